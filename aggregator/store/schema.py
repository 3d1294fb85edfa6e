"""The tables, in one text for every engine, and the version that they are of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from aggregator.errors import AggregatorError

# The tables, in SQLite's words; ``postgres`` has a word of its own for each type. A change of them
# after a release is a new version, and begins at ``require_version``.

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value ANY NOT NULL) STRICT;
CREATE TABLE descriptors (
    serial INTEGER PRIMARY KEY,
    message BLOB NOT NULL,
    honoured_until_unix INTEGER          -- NULL: the current one
) STRICT;
CREATE TABLE group_keys (epoch INTEGER PRIMARY KEY, key BLOB NOT NULL) STRICT;
CREATE TABLE tokens (
    token_id BLOB PRIMARY KEY,
    secret BLOB NOT NULL,
    created_unix INTEGER NOT NULL,
    expires_unix INTEGER NOT NULL,
    replaces BLOB,
    device_id BLOB,                      -- who used it
    strangers INTEGER NOT NULL DEFAULT 0,
    last_stranger BLOB,                  -- the key of the latest stranger who tried to
    name TEXT,                           -- of the device that will use it
    labels TEXT NOT NULL DEFAULT '{}'    -- JSON: likewise
) STRICT;
CREATE TABLE devices (
    device_id BLOB PRIMARY KEY,
    identity BLOB NOT NULL,
    handle BLOB NOT NULL UNIQUE,
    admission_key BLOB NOT NULL,         -- zeros once it is revoked
    shard INTEGER NOT NULL,
    token_id BLOB NOT NULL,
    enrolled_unix INTEGER NOT NULL,
    first_round INTEGER NOT NULL,        -- takes part from this opening on, see rounds.opening
    revoked_unix INTEGER,
    labels TEXT NOT NULL DEFAULT '{}',   -- JSON: what tasks choose their devices by
    name TEXT                            -- the operator's
) STRICT;
CREATE TABLE tasks (
    task INTEGER PRIMARY KEY,            -- 1: the first, whose file has the fleet's tables
    name TEXT UNIQUE,                    -- NULL: the first one, before it was served
    state TEXT NOT NULL,                 -- 'active', 'paused', 'retiring' or 'retired'
    file TEXT NOT NULL,                  -- the task file, relative to the home
    served TEXT,                         -- the file's text that the state belongs to
    unwritten TEXT,                      -- what the file is to hold, until it does
    request TEXT,                        -- JSON: what the operator wants it replaced by
    problem TEXT                         -- why it is not served, or not as the file says
) STRICT;
CREATE TABLE task_facts (
    task INTEGER NOT NULL,
    name TEXT NOT NULL,
    value ANY NOT NULL,
    PRIMARY KEY (task, name)
) STRICT;
CREATE TABLE rounds (
    task INTEGER NOT NULL,
    round INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    version INTEGER NOT NULL,            -- what its broadcast carries
    opened_unix REAL NOT NULL,
    deadline_unix REAL NOT NULL,
    seed BLOB NOT NULL,
    threshold BLOB NOT NULL,             -- 8 bytes little-endian: SQLite has no unsigned integers
    expected INTEGER NOT NULL,
    items INTEGER NOT NULL,
    closed_unix REAL,                    -- NULL: open
    took_seconds REAL,                   -- by the monotonic clock; NULL: open, or given up
    next_version INTEGER,                -- NULL when the quorum was missed
    participants INTEGER,
    metrics TEXT,                        -- JSON
    held TEXT,                           -- why the round may not close
    forgotten INTEGER NOT NULL DEFAULT 0,
    closed_served_seconds REAL,          -- how long serve had run, in all, when it was seen closed
    opening INTEGER NOT NULL,            -- the how-manieth round of any task it was to open
    PRIMARY KEY (task, round)
) STRICT;
CREATE INDEX remembered ON rounds (task, round) WHERE forgotten = 0;
CREATE TABLE updates (                   -- the log: what is not part of a version yet
    task INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    round INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    arrived_seconds REAL NOT NULL,
    quarantined TEXT,                    -- why it could not be absorbed
    body BLOB NOT NULL,
    PRIMARY KEY (task, seq)
) STRICT;
CREATE TABLE verdicts (
    task INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    round INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    body_sha256 BLOB NOT NULL,
    reason TEXT,                         -- NULL: counted; 'noted': a report alone; else refused
    seconds REAL NOT NULL DEFAULT 0,     -- after the round opened
    PRIMARY KEY (task, generation, round, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE reports (                   -- of the last rounds, see Reports
    task INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    round INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    outcome TEXT NOT NULL,
    reason TEXT NOT NULL,                -- empty where it trained
    sdk TEXT,                            -- NULL, like what follows, where the app keeps it
    runtime TEXT,
    platform TEXT,
    option TEXT,                         -- columns or artifact that was trained
    seconds REAL,
    received_bytes INTEGER,
    items INTEGER,                       -- recorded on the device, each once; NULL: no catalogue
    unknown_items INTEGER,               -- of them, to the task's catalogue
    PRIMARY KEY (task, generation, round, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE participations (            -- each device's newest, in each task
    task INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    counted_unix INTEGER,                -- of its newest update that was counted
    width INTEGER,                       -- of that one; NULL: it had no columns
    told_unix INTEGER,                   -- when it told last how a round ended
    round INTEGER,                       -- which one
    report BLOB,                         -- as it came, without evaluation; NULL: revoked since
    PRIMARY KEY (task, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE habits (                    -- when devices' updates come, see Habit
    task INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    seconds REAL,                        -- after a round opened; NULL: none came yet
    missed INTEGER NOT NULL,
    lives INTEGER NOT NULL,
    PRIMARY KEY (task, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE sightings (                 -- when a device proved last that it was there
    device_id BLOB PRIMARY KEY,
    seen_unix INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE clashes (                   -- when two machines had one device's identity, last
    device_id BLOB PRIMARY KEY,
    seen_unix INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE checkpoints (
    task INTEGER NOT NULL,
    kind TEXT NOT NULL,                  -- 'version', or 'partial' within an open round
    round INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    version INTEGER NOT NULL,
    state BLOB NOT NULL,
    PRIMARY KEY (task, kind)
) STRICT;
CREATE TABLE publications (
    topic TEXT PRIMARY KEY,
    task INTEGER NOT NULL,
    part TEXT NOT NULL,                  -- 'attachment.ID', 'content.ID' or 'round'
    place INTEGER NOT NULL,              -- the order of sending
    message BLOB                         -- NULL: to be cleared from the broker
) STRICT;
CREATE TABLE versions (
    task INTEGER NOT NULL,
    version INTEGER NOT NULL,
    round INTEGER NOT NULL,              -- that made it; 0: the first one
    closed_unix REAL NOT NULL,
    devices INTEGER NOT NULL,
    artifact TEXT NOT NULL,              -- of its parameters, hexadecimal; empty: none
    origin TEXT NOT NULL,                -- of one that no round made
    bytes INTEGER NOT NULL,              -- of the model; 0: the method keeps none
    metrics TEXT NOT NULL,               -- JSON
    pinned INTEGER NOT NULL DEFAULT 0,
    awaited INTEGER NOT NULL DEFAULT 0,  -- to become the next version
    model BLOB,                          -- safetensors; NULL: dropped
    items INTEGER NOT NULL,              -- of the catalogue, that it has vectors of
    PRIMARY KEY (task, version)
) STRICT;
CREATE INDEX awaited_versions ON versions (task) WHERE awaited = 1;
CREATE TABLE device_evaluations (        -- until their version is followed by another
    task INTEGER NOT NULL,
    version INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    part TEXT NOT NULL,                  -- its capacity class; empty: none named
    report BLOB NOT NULL,
    PRIMARY KEY (task, version, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE figures (
    task INTEGER NOT NULL,
    version INTEGER NOT NULL,
    stage TEXT NOT NULL,
    metric TEXT NOT NULL,
    part TEXT NOT NULL,                  -- empty: the fleet
    round INTEGER NOT NULL,              -- the last one that evaluated the version
    devices INTEGER NOT NULL,
    samples REAL NOT NULL,
    capped INTEGER NOT NULL,
    value REAL,                          -- NULL: the statistics do not define it, here and below
    error_bound REAL,
    median REAL,
    deciles TEXT NOT NULL,               -- JSON
    typical REAL,
    PRIMARY KEY (task, version, stage, metric, part)
) STRICT, WITHOUT ROWID;
CREATE TABLE refusals (reason TEXT PRIMARY KEY, count INTEGER NOT NULL) STRICT;
CREATE TABLE lease (
    one INTEGER PRIMARY KEY,             -- 1
    holder TEXT NOT NULL,                -- who coordinates the cluster
    term INTEGER NOT NULL,
    until_unix REAL NOT NULL,            -- by the store's clock
    program TEXT NOT NULL                -- its version
) STRICT;
CREATE TABLE workers (
    slot INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,              -- rises with each start
    cell TEXT NOT NULL,
    shards TEXT NOT NULL,                -- in words
    program TEXT NOT NULL,
    heartbeat_unix REAL NOT NULL,
    connected INTEGER NOT NULL DEFAULT 0 -- to its cell's broker
) STRICT;
CREATE TABLE shares (                    -- what workers have of rounds that are in no version yet
    task INTEGER NOT NULL,
    round INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    commits INTEGER NOT NULL,
    counted INTEGER NOT NULL,
    heard INTEGER NOT NULL,
    state BLOB,                          -- NULL: bodies are kept
    PRIMARY KEY (task, round, slot)
) STRICT;
CREATE TABLE late_arrivals (             -- that workers heard, for the coordinator
    task INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    seconds REAL,                        -- after its round opened; NULL: it has no update
    PRIMARY KEY (task, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE freshness (                 -- opens granted in a cluster's life
    sender BLOB PRIMARY KEY,
    counter BLOB NOT NULL                -- 8 bytes, most significant first
) STRICT, WITHOUT ROWID;
CREATE TABLE device_changes (            -- of the table devices, newest last
    revision INTEGER PRIMARY KEY,
    device_id BLOB NOT NULL
) STRICT;
"""
FIRST_TASK = """
INSERT INTO tasks (task, state, file) VALUES (1, 'active', 'task.toml')
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A table: the declared type of each column, in their order, and the columns of its key."""

    columns: Mapping[str, str]
    key: tuple[str, ...]


def _shapes() -> dict[str, Shape]:
    shapes = {}
    for name, inner in re.findall(
        r"^CREATE TABLE (\w+) \((.*?)\) STRICT", re.sub(r" *--.*", "", SCHEMA), re.S | re.M
    ):
        parts = [part.strip() for part in re.split(r",(?![^(]*\))", inner)]
        columns = {
            part.split()[0]: part.split()[1] for part in parts if "PRIMARY KEY (" not in part
        }
        key = [part.split()[0] for part in parts if part.endswith("PRIMARY KEY")]
        for part in parts:
            if part.startswith("PRIMARY KEY ("):
                key = re.findall(r"\w+", part)[2:]
        shapes[name] = Shape(columns, tuple(key))
    return shapes


TABLES = _shapes()
"""Each table of the schema, by its name."""


def or_replace(table: str) -> str:
    """The end of an ``INSERT`` of whole rows that puts each in the place of one of its key."""
    shape = TABLES[table]
    others = ", ".join(
        f"{each} = excluded.{each}" for each in shape.columns if each not in shape.key
    )
    return f"ON CONFLICT ({', '.join(shape.key)}) DO UPDATE SET {others}"


def require_version(where: str, version: int) -> None:
    """Raises AggregatorError for a store that another version of the product made."""
    if version != SCHEMA_VERSION:
        raise AggregatorError(
            f"{where} has store format {version}, and this version of tessera-edge reads "
            f"{SCHEMA_VERSION}: install the newer version that made it; where a development "
            "version made it (before 0.1.0), make the home anew (tessera-aggregator init)"
        )
