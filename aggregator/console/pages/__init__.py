"""The console's pages, in the order of its navigation: all that there are."""

from __future__ import annotations

from typing import Any

from aggregator.console.pages.audit import AUDIT
from aggregator.console.pages.devices import DEVICE, DEVICES
from aggregator.console.pages.learning import LEARNING
from aggregator.console.pages.models import MODELS
from aggregator.console.pages.now import NOW
from aggregator.console.pages.page import ConsolePage
from aggregator.console.pages.runs import RUNS

PAGES: tuple[ConsolePage[Any], ...] = (NOW, LEARNING, DEVICES, DEVICE, MODELS, RUNS, AUDIT)
