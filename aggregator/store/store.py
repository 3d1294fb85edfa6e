"""All tables of one database."""

from __future__ import annotations

from aggregator.store.attachments import AttachmentBooks
from aggregator.store.checkpoints import Checkpoints
from aggregator.store.database import Database
from aggregator.store.devices import Devices
from aggregator.store.facts import Facts
from aggregator.store.publications import Publications
from aggregator.store.refusal_counts import RefusalCounts
from aggregator.store.rounds import Rounds
from aggregator.store.secrets import Secrets
from aggregator.store.tokens import Tokens
from aggregator.store.update_log import UpdateLog

__all__ = ["Store"]


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
        self.publications = Publications(database)
        self.attachments = AttachmentBooks(database)
        self.refusals = RefusalCounts(database)
