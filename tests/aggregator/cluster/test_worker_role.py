"""Workers that reach the store as a role of their own: they serve a fleet, and can do no more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.registry import revoke
from aggregator.store import open_database
from aggregator.store.roles import WORKER
from aggregator.store.schema import TABLES
from aggregator.task.cluster import Cell, Cluster
from device_sdk.wire.publish.receipts import RecordType, Verdict, leave_digest
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.clusters import Threads, coordinated
from tests.fakes.homes import command, invite, make_home
from tests.fakes.outputs import error_of
from tests.fakes.waiting import wait_until
from tests.servers.fixtures import MakeDatabase
from tests.servers.postgres import USER, PostgresServer

psycopg = pytest.importorskip("psycopg")
DEVICES = 4
ROUND = f"quorum = {DEVICES}\nwait_for_devices = {DEVICES}"
_NUMBERS = count(1)


@pytest.fixture
def role(postgres: PostgresServer) -> Iterator[str]:
    name = f"workers_{next(_NUMBERS)}"
    postgres.run(f"CREATE ROLE {name} LOGIN")
    yield name
    for (database,) in postgres.run("SELECT datname FROM pg_database WHERE datname LIKE 'test_%'"):
        postgres.run(f"DROP OWNED BY {name}", database)
    postgres.run(f"DROP ROLE {name}")


def _home(tmp_path: Path, broker: str, url: str, role: str) -> tuple[AggregatorHome, str]:
    """A home whose store is there, and the URL that its workers use."""
    home = make_home(tmp_path, broker, ROUND, store_url=url)
    as_worker = url.replace(f"{USER}@", f"{role}@")
    with home.task_file.open("a") as file:
        file.write(f'\n[cluster]\nstore = "{url}"\nworker_store = "{as_worker}"\n')
    assert command(home, "store", "--worker-role", role) == 0
    return home, as_worker


def test_a_fleet_is_served_by_workers_of_a_role_of_their_own(
    mosquitto: Mosquitto, tmp_path: Path, make_database: MakeDatabase, role: str
) -> None:
    """Rounds that keep bodies and rounds of sums, devices that move, leave and are revoked."""
    url = make_database()
    home, as_worker = _home(tmp_path, mosquitto.url, url, role)
    cluster = Cluster((Cell("", None, 2),), url, worker_store=as_worker)
    with coordinated(home, cluster) as running:
        assert isinstance(running.runtime, Threads)
        for each in running.runtime.workers:
            assert each._post.store == as_worker and url not in repr(each._post)
        devices = [
            ScriptedDevice(mosquitto.url, code, seed).enrol().join()
            for seed, code in enumerate(invite(home, DEVICES))
        ]
        for number in range(1, 4):
            for each in devices:
                manifest = each.await_round(number)
                receipt = each.send_and_wait(manifest, each.body())
                assert receipt.verdict is Verdict.COUNTED
        for each in devices:
            each.await_round(4)

        def sessions() -> int:
            return sum(each.sessions for each in running.runtime.statuses())

        leaver = devices[1].require_grant().device_id
        devices[1].publish_up(devices[1].sessions.seal(RecordType.LEAVE, b""))
        assert devices[1].await_receipt(leave_digest(leaver)).verdict is Verdict.NOTED
        store = home.open_store()
        with store.database.transaction():
            assert revoke(store, devices[0].require_grant().device_id, 1)
        wait_until(lambda: sessions() == DEVICES - 2, sessions)
        wait_until(
            lambda: len(running.parts.registry) == DEVICES - 2, lambda: len(running.parts.registry)
        )
        assert running.runtime.errors == []
        row = store.devices.find(leaver)
        assert row is not None and row.revoked_unix_seconds is not None
        assert row.admission_key == bytes(32) and store.facts.rotation_due
        counted = [row.participants for row in store.first.rounds.latest(9) if not row.unfinished]
        assert counted == [DEVICES] * 3
        store.database.close()
        for each in devices:
            each.disconnect()


_REFUSED = (
    "SELECT secret FROM tokens",
    "SELECT message FROM descriptors",
    "SELECT body FROM updates",
    "SELECT model FROM versions",
    "SELECT message FROM publications",
    "INSERT INTO devices SELECT * FROM devices",
    "UPDATE devices SET identity = ''",
    "UPDATE devices SET handle = ''",
    "UPDATE devices SET labels = '{}'",
    "UPDATE devices SET first_round = 0",
    "DELETE FROM devices",
    "DELETE FROM device_changes",
    "INSERT INTO device_changes VALUES (9223372036854775807, '')",
    "INSERT INTO group_keys VALUES (99, '')",
    "UPDATE group_keys SET key = ''",
    "UPDATE rounds SET held = NULL",
    "UPDATE rounds SET closed_unix = NULL",
    "INSERT INTO rounds SELECT * FROM rounds",
    "DELETE FROM verdicts",
    "UPDATE verdicts SET device_id = ''",
    "DELETE FROM updates",
    "DELETE FROM freshness",
    "DELETE FROM shares",
    "UPDATE checkpoints SET state = ''",
    "DELETE FROM checkpoints",
    "INSERT INTO facts VALUES ('root_fingerprint2', '')",
    "UPDATE tasks SET served = ''",
    "UPDATE task_facts SET value = ''",
    "UPDATE lease SET term = 0",
    "UPDATE tessera_store SET identity = ''",
    "TRUNCATE verdicts",
    "CREATE TABLE public.another (one INT)",
    "ALTER TABLE devices DISABLE ROW LEVEL SECURITY",
    "DROP POLICY tessera_worker_update ON devices",
)
_WITHOUT_EFFECT = (
    "UPDATE devices SET revoked_unix = NULL WHERE revoked_unix IS NOT NULL",
    "UPDATE devices SET admission_key = 'x' WHERE revoked_unix IS NOT NULL",
    "UPDATE facts SET value = '' WHERE name != 'rotation_due'",
    "UPDATE tessera_commits SET number = 0",
    "DELETE FROM tessera_commits",
)


def test_the_role_of_workers_can_do_nothing_else(
    mosquitto: Mosquitto,
    tmp_path: Path,
    make_database: MakeDatabase,
    postgres: PostgresServer,
    role: str,
) -> None:
    url = make_database()
    home, as_worker = _home(tmp_path, mosquitto.url, url, role)
    store = home.open_store()
    [code] = invite(home, 1)
    assert code
    with store.database.transaction():
        store.database.execute(
            "INSERT INTO devices VALUES (?, ?, ?, ?, 1, ?, 1, 1, 1, '{}', NULL)", (b"d" * 16,) * 5
        )
        store.database.execute(
            "INSERT INTO rounds (task, round, generation, version, opened_unix, deadline_unix, "
            "seed, threshold, expected, items, opening) "
            "VALUES (1, 1, 1, 1, 1, 1, ?, ?, 1, 1, 1)",
            (b"s", bytes(8)),
        )
    with psycopg.connect(as_worker, autocommit=True) as connection:
        for statement in _REFUSED:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())
        for statement in _WITHOUT_EFFECT:
            assert connection.execute(statement.encode()).rowcount == 0, statement
        facts = connection.execute("SELECT name FROM facts").fetchall()
        assert {name for (name,) in facts} <= {
            "cluster_life", "generation", "mirrored", "rotation_due", "seed",
        }  # fmt: skip
        for table in {*TABLES} - {*WORKER}:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(f"SELECT 1 FROM {table}".encode())
    store.database.close()
    # The owner sees and does all of it as before, and again gives the same.
    assert command(home, "store", "--worker-role", role) == 0
    assert command(home, "status") == 0
    open_database(as_worker, by_worker=True).close()
    with pytest.raises(AggregatorError, match="may not read and write"):
        open_database(as_worker)


def test_a_role_with_more_rights_is_refused(
    mosquitto: Mosquitto,
    tmp_path: Path,
    make_database: MakeDatabase,
    role: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home, _ = _home(tmp_path, mosquitto.url, make_database(), role)
    for name, word in ((USER, "may do all that"), ("nobody_here", "CREATE ROLE")):
        assert word in error_of(capsys, home, "store", "--worker-role", name)


def test_a_store_in_a_file_has_no_roles(
    tmp_path: Path, mosquitto: Mosquitto, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    assert "is a file" in error_of(capsys, home, "store", "--worker-role", "workers")
