"""Everything the aggregator must not lose: one SQLite file in write-ahead mode."""

from __future__ import annotations

from aggregator.store.database import STORE_FAILURES, Database
from aggregator.store.store import Store

__all__ = ["STORE_FAILURES", "Database", "Store"]
