"""The homes of a run, on both sides, written as enrolment would leave them."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.errors import StoreUnreached
from aggregator.home import AggregatorHome as AggregatorHome
from aggregator.keys.folder import current_descriptor, initialise
from aggregator.store import Store
from aggregator.store.rows import DeviceRow
from device_sdk.home.home import Home as DeviceHome
from device_sdk.home.membership import Membership
from device_sdk.link.broker_url import BrokerWay
from device_sdk.wire.seal.enrolment_message import Grant
from device_sdk.wire.seal.placement import shard_of
from tests.fakes.waiting import PATIENCE_SECONDS, endless
from tests.faults.known import ITEMS, MOST_DEVICES, WIDTH

# Of the first task, a copy of every update that was ever committed, in the order of commits: the
# product's own log is cleared at each version; and of every verdict, since the product forgets
# those in time; each with the round that was the newest then. Triggers, so that copy and original
# are in one transaction. And when each round opened, by this machine's clock: the aggregator's
# jumps, and so does PostgreSQL's.
_AUDIT = """
CREATE TABLE opened (round INTEGER, unix REAL);
CREATE TRIGGER note_opening AFTER INSERT ON rounds WHEN NEW.task = 1 BEGIN
    INSERT INTO opened VALUES (NEW.round, (julianday('now') - 2440587.5) * 86400);
END;
CREATE TABLE audit (n INTEGER PRIMARY KEY, round INTEGER, device_id BLOB, body BLOB,
    entered INTEGER);
CREATE TRIGGER copy_update AFTER INSERT ON updates WHEN NEW.task = 1 BEGIN
    INSERT INTO audit (round, device_id, body, entered) VALUES (NEW.round, NEW.device_id, NEW.body,
        (SELECT max(round) FROM rounds WHERE task = 1));
END;
CREATE TABLE judged (generation INTEGER, round INTEGER, device_id BLOB, reason TEXT,
    entered INTEGER, PRIMARY KEY (generation, round, device_id)) WITHOUT ROWID;
CREATE TRIGGER copy_verdict AFTER INSERT ON verdicts WHEN NEW.task = 1 BEGIN
    INSERT INTO judged VALUES (NEW.generation, NEW.round, NEW.device_id, NEW.reason,
        (SELECT max(round) FROM rounds WHERE task = 1));
END;
CREATE TRIGGER change_verdict AFTER UPDATE ON verdicts WHEN NEW.task = 1 BEGIN
    UPDATE judged SET reason = NEW.reason WHERE generation = NEW.generation
        AND round = NEW.round AND device_id = NEW.device_id;
END;
"""
# What workers have of a round, as often as they write it: whoever lost its slot must write nothing.
_AUDIT_SHARES = """
CREATE TABLE audit_shares (n INTEGER PRIMARY KEY, round INTEGER, slot INTEGER, epoch INTEGER,
    commits INTEGER, counted INTEGER);
CREATE TRIGGER copy_share AFTER INSERT ON shares BEGIN
    INSERT INTO audit_shares (round, slot, epoch, commits, counted)
        VALUES (NEW.round, NEW.slot, NEW.epoch, NEW.commits, NEW.counted);
END;
CREATE TRIGGER copy_changed_share AFTER UPDATE ON shares BEGIN
    INSERT INTO audit_shares (round, slot, epoch, commits, counted)
        VALUES (NEW.round, NEW.slot, NEW.epoch, NEW.commits, NEW.counted);
END;
"""
_AUDIT_POSTGRES = """
CREATE TABLE opened (round BIGINT, unix DOUBLE PRECISION);
CREATE TABLE audit (n BIGSERIAL PRIMARY KEY, round BIGINT, device_id BYTEA, body BYTEA,
    entered BIGINT);
CREATE TABLE judged (generation BIGINT, round BIGINT, device_id BYTEA, reason TEXT, entered BIGINT,
    PRIMARY KEY (generation, round, device_id));
CREATE TABLE audit_shares (n BIGSERIAL PRIMARY KEY, round BIGINT, slot BIGINT, epoch BIGINT,
    commits BIGINT, counted BIGINT);
CREATE FUNCTION note_opening() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO opened VALUES (NEW.round,
        BOOTED + split_part(pg_read_file('/proc/uptime'), ' ', 1)::float8);
    RETURN NULL;
END $$;
CREATE FUNCTION copy_update() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO audit (round, device_id, body, entered) VALUES (NEW.round, NEW.device_id, NEW.body,
        (SELECT max(round) FROM rounds WHERE task = 1));
    RETURN NULL;
END $$;
CREATE FUNCTION copy_verdict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO judged VALUES (NEW.generation, NEW.round, NEW.device_id, NEW.reason,
        (SELECT max(round) FROM rounds WHERE task = 1));
    RETURN NULL;
END $$;
CREATE FUNCTION change_verdict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE judged SET reason = NEW.reason WHERE generation = NEW.generation
        AND round = NEW.round AND device_id = NEW.device_id;
    RETURN NULL;
END $$;
CREATE FUNCTION copy_share() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO audit_shares (round, slot, epoch, commits, counted)
        VALUES (NEW.round, NEW.slot, NEW.epoch, NEW.commits, NEW.counted);
    RETURN NULL;
END $$;
CREATE TRIGGER note_opening AFTER INSERT ON rounds FOR EACH ROW EXECUTE FUNCTION note_opening();
CREATE TRIGGER copy_update AFTER INSERT ON updates FOR EACH ROW EXECUTE FUNCTION copy_update();
CREATE TRIGGER copy_verdict AFTER INSERT ON verdicts
    FOR EACH ROW EXECUTE FUNCTION copy_verdict();
CREATE TRIGGER change_verdict AFTER UPDATE ON verdicts
    FOR EACH ROW EXECUTE FUNCTION change_verdict();
CREATE TRIGGER copy_share AFTER INSERT OR UPDATE ON shares
    FOR EACH ROW EXECUTE FUNCTION copy_share();
"""
# What a device forgets about rounds long past, for the oracle.
_HISTORY = """
CREATE TABLE forgotten AS SELECT * FROM participation WHERE 0;
CREATE TRIGGER keep_history BEFORE DELETE ON participation BEGIN
    INSERT INTO forgotten SELECT * FROM participation WHERE number = OLD.number;
END;
"""


@dataclass(frozen=True)
class FleetHome:
    """Where everything lies. ``device_ids`` by place; ``clustered``: workers take updates in, and
    rounds enter as sums where ``adds_up``."""

    aggregator: AggregatorHome
    devices: tuple[Path, ...]
    device_ids: tuple[bytes, ...]
    items: int
    clustered: bool = False
    adds_up: bool = True
    ladder: bool = False
    """Whether devices train parts of one model (`known_ladder.py`)."""

    def open_store(self) -> Store:
        """A busy server, and one that comes back, are waited for."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self.aggregator.open_store()
            except StoreUnreached:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)


def make_fleet(
    folder: Path,
    url: str,
    devices: int,
    round_lines: str,
    seed: int,
    items: int = ITEMS,
    *,
    shared_columns: bool = False,
    store_url: str | None = None,
    method: str = "scatter",
    further_tables: str = "",
) -> FleetHome:
    """An aggregator with a task of known updates, and ``devices`` enrolled devices.

    ``items``: rows of the model; known updates use the first ``ITEMS``. The oracle can tell
    devices apart by their columns; with ``shared_columns`` there may be more of them than that.
    ``store_url``: of an empty database of PostgreSQL, for the store; None: a file in the home.
    ``further_tables`` end the task file.

    Raises ValueError for more devices than the method has columns for.
    """
    if devices < 1 or (devices > MOST_DEVICES and not shared_columns):
        raise ValueError(f"{devices} devices; expected 1 to {MOST_DEVICES}")
    rng = np.random.default_rng(seed)
    home = AggregatorHome(folder / "aggregator", store_url)
    initialise(home, int(time.time()), rng.bytes)
    (home.folder / "items.tsv").write_text("".join(f"item-{row}\n" for row in range(items)))
    home.task_file.write_text(
        f'[task]\nmethod = "{method}"\ncatalogue = "items.tsv"\n'
        'broadcast_codec = "float32"\nupdate_codec = "float32"\n'
        f'[broker]\nurl = "{url}"\n[round]\n{endless(round_lines)}\n'
        "[store]\ngroup_updates = 16\ncheckpoint_updates = 7\n"
        f"[{method}]\ncolumns = {WIDTH}\n{further_tables}"
    )
    store = home.open_store()
    descriptor = current_descriptor(store)
    fingerprint = descriptor.root_fingerprint
    paths, ids = [], []
    with store.database.transaction():
        for place in range(devices):
            path = folder / f"device-{place}"
            mine = DeviceHome(path, create=True)
            identity = mine.identity(create=True).public_key().public_bytes_raw()
            device_id = rng.bytes(16)
            grant = Grant(device_id, rng.bytes(16), rng.bytes(32), shard_of(device_id))
            mine.membership.save(
                Membership(BrokerWay.parse(url), "tessera", "default", "all", fingerprint, grant),
                descriptor,
                int(time.time()),
            )
            mine.close()
            keep_history(path)
            store.devices.add(
                DeviceRow(
                    grant.device_id,
                    identity,
                    grant.handle,
                    grant.admission_key,
                    grant.shard,
                    rng.bytes(8),
                    int(time.time()),
                    1,
                )
            )
            paths.append(path)
            ids.append(grant.device_id)
    store.database.close()
    audit(home)
    return FleetHome(home, tuple(paths), tuple(ids), items)


def audit(home: AggregatorHome) -> None:
    """Have the oracle's copies kept from now on; nobody may have the database open."""
    if home.store_url is None:
        _run_script(home.database, _AUDIT + _AUDIT_SHARES)
        return
    import psycopg  # not for every run

    with psycopg.connect(home.store_url) as connection:
        uptime_seconds = float(Path("/proc/uptime").read_text().split()[0])
        booted = repr(time.time() - uptime_seconds)
        connection.execute(_AUDIT_POSTGRES.replace("BOOTED", booted).encode())


def keep_history(device: Path) -> None:
    """The same for the home of a device."""
    _run_script(device / "device.sqlite", _HISTORY)


def _run_script(path: Path, script: str) -> None:
    database = sqlite3.connect(path)
    database.executescript(script)
    database.close()
