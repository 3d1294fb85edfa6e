"""Everything the aggregator must not lose: one SQLite file in write-ahead mode."""

from __future__ import annotations

from aggregator.store.checkpoints import Checkpoints
from aggregator.store.database import STORE_FAILURES, Database
from aggregator.store.devices import Devices, Secrets, Tokens
from aggregator.store.evaluations import Evaluations
from aggregator.store.facts import Facts, RefusalCounts
from aggregator.store.publications import AttachmentBooks, Publications
from aggregator.store.rounds import Rounds
from aggregator.store.update_log import UpdateLog
from aggregator.store.versions import Versions

__all__ = ["STORE_FAILURES", "Database", "Store"]


class Store:
    """The tables, each behind an object of its own; they share the database's transactions."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.facts = Facts(database)
        self.secrets = Secrets(database)
        self.tokens = Tokens(database)
        self.devices = Devices(database)
        self.rounds = Rounds(database)
        self.log = UpdateLog(database)
        self.checkpoints = Checkpoints(database)
        self.versions = Versions(database)
        self.evaluations = Evaluations(database)
        self.publications = Publications(database)
        self.attachments = AttachmentBooks(self.facts)
        self.refusals = RefusalCounts(database)
