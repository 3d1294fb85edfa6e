"""Every decoder of the product, by the name under which it is fuzzed."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz.codec_targets import CODEC_TARGETS
from tests.fuzz.file_targets import FILE_TARGETS
from tests.fuzz.method_targets import METHOD_TARGETS
from tests.fuzz.sealed_targets import SEALED_TARGETS
from tests.fuzz.target import Target

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (*CODEC_TARGETS, *SEALED_TARGETS, *METHOD_TARGETS, *FILE_TARGETS)
}
