"""The tables. A change of them is a new version, with a step that brings an older file to it."""

from __future__ import annotations

SCHEMA_VERSION = 2

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
    last_stranger BLOB                   -- the key of the latest stranger who tried to
) STRICT;
CREATE TABLE devices (
    device_id BLOB PRIMARY KEY,
    identity BLOB NOT NULL,
    handle BLOB NOT NULL UNIQUE,
    admission_key BLOB NOT NULL,         -- zeros once it is revoked
    shard INTEGER NOT NULL,
    token_id BLOB NOT NULL,
    enrolled_unix INTEGER NOT NULL,
    first_round INTEGER NOT NULL,        -- takes part from this round on
    revoked_unix INTEGER,
    last_counted_unix INTEGER,
    last_width INTEGER
) STRICT;
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    version INTEGER NOT NULL,            -- what its broadcast carries
    opened_unix REAL NOT NULL,
    deadline_unix REAL NOT NULL,
    seed BLOB NOT NULL,
    threshold BLOB NOT NULL,             -- 8 bytes little-endian: SQLite has no unsigned integers
    expected INTEGER NOT NULL,
    items INTEGER NOT NULL,
    closed_unix REAL,                    -- NULL: open
    next_version INTEGER,                -- NULL when the quorum was missed
    participants INTEGER,
    metrics TEXT,                        -- JSON
    arrivals BLOB,                       -- float32, seconds after the round opened
    held TEXT,                           -- why the round may not close
    forgotten INTEGER NOT NULL DEFAULT 0,
    closed_served_seconds REAL           -- how long serve had run, in all, when it was seen closed
) STRICT;
CREATE INDEX remembered ON rounds (round) WHERE forgotten = 0;
CREATE TABLE updates (                   -- the log: what is not part of a version yet
    seq INTEGER PRIMARY KEY,
    round INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    arrived_seconds REAL NOT NULL,
    quarantined TEXT,                    -- why it could not be absorbed
    body BLOB NOT NULL
) STRICT;
CREATE TABLE verdicts (
    generation INTEGER NOT NULL,
    round INTEGER NOT NULL,
    device_id BLOB NOT NULL,
    body_sha256 BLOB NOT NULL,
    reason TEXT,                         -- NULL: counted; else refused
    PRIMARY KEY (generation, round, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE checkpoints (
    kind TEXT PRIMARY KEY,               -- 'version', or 'partial' within an open round
    round INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    version INTEGER NOT NULL,
    state BLOB NOT NULL
) STRICT;
CREATE TABLE publications (
    topic TEXT PRIMARY KEY,
    part TEXT NOT NULL,                  -- 'attachment.ID', 'contents' or 'round'
    place INTEGER NOT NULL,              -- the order of sending
    message BLOB                         -- NULL: to be cleared from the broker
) STRICT;
CREATE TABLE refusals (reason TEXT PRIMARY KEY, count INTEGER NOT NULL) STRICT;
"""

STEPS = {
    1: """
ALTER TABLE rounds ADD COLUMN closed_served_seconds REAL;
CREATE INDEX remembered ON rounds (round) WHERE forgotten = 0;
UPDATE devices SET admission_key = zeroblob(32) WHERE revoked_unix IS NOT NULL;
""",
}
"""By the version that a file has, what makes it one of the next version."""

WITHOUT_ERASING = frozenset((1,))
"""Versions whose programs freed what they deleted, and did not overwrite it."""
