"""What a store in PostgreSQL adds: connections that are lost, servers that will not do."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from aggregator.errors import AggregatorError, OutcomeUnknown, StoreError
from aggregator.evaluation import Figure, as_json
from aggregator.store import Store, create_database, open_database
from aggregator.store.postgres import settings_of
from aggregator.store.rows import StoredReport, StoredVerdict
from aggregator.store.schema import SCHEMA_VERSION
from tests.brokers.mosquitto import free_port
from tests.brokers.proxy import Proxy
from tests.fakes.child_environment import child_environment
from tests.fakes.homes import make_home
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until
from tests.servers.commit_cut import ByteCut, CommitCut, Way, Where
from tests.servers.fixtures import MakeDatabase
from tests.servers.postgres import MISSING, PROGRAMS, PostgresServer, running_postgres
from tests.servers.told_connecting import ToldConnecting


@pytest.fixture
def url(make_database: MakeDatabase) -> str:
    """Of a database with a store."""
    made = make_database()
    create_database(made).close()
    return made


@pytest.fixture
def cut(postgres: PostgresServer) -> Iterator[CommitCut]:
    proxy = CommitCut(postgres.port)
    yield proxy
    proxy.stop()


def through(url: str, proxy: Proxy) -> Store:
    return Store(open_database(re.sub(r":\d+/", f":{proxy.port}/", url)))


@contextmanager
def opened(url: str) -> Iterator[Store]:
    with closing(open_database(url)) as database:
        yield Store(database)


FORKED = """
import json, os, sys
from contextlib import suppress
from aggregator.store import Store, open_database

def said(call):
    try:
        return f"did {call()!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

store = Store(open_database(sys.argv[1]))
backend = store.database.row("SELECT pg_backend_pid()")
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    calls = (store.refusals.all, lambda: store.refusals.add({"late": 1}), store.database.close)
    os.write(writing, json.dumps([said(call) for call in calls]).encode())
    sys.exit(0)  # all that is left is collected
os.close(writing)
assert os.waitpid(child, 0)[1] == 0
with os.fdopen(reading) as file:
    told = json.load(file)
print(json.dumps([told, store.database.row("SELECT pg_backend_pid()") == backend]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_connection_is_its_process_s_and_no_fork_s(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, url],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=child_environment(),
    )
    assert done.returncode == 0, done.stderr
    (read, write, close), goes_on = json.loads(done.stdout)
    for each in (read, write):
        assert each.startswith("ForkedError: the connection to ") and "a fork of it" in each
    assert close == "did None" and goes_on is True, "the parent's session is as it was"


# -- a connection that is lost ---------------------------------------------------------------------


def test_a_commit_without_an_answer_is_looked_up_and_found(url: str, cut: CommitCut) -> None:
    store = through(url, cut)
    cut.arm("after")
    store.refusals.add({"late": 1})  # no error: it is kept
    assert store.refusals.all() == {"late": 1}
    store.database.close()


@pytest.mark.parametrize("where", ["before", "late"])
def test_a_commit_that_did_not_arrive_is_told_from_one_that_did(
    url: str, cut: CommitCut, where: Where
) -> None:
    store = through(url, cut)
    cut.arm(where)
    failed = False
    try:
        store.refusals.add({"late": 1})
    except StoreError as error:
        failed = not isinstance(error, OutcomeUnknown)
    # What arrives late is waited for, since the server holds that transaction's row until it ends.
    assert store.refusals.all() == ({} if failed else {"late": 1})
    assert failed == (where == "before")
    store.refusals.add({"late": 1})  # the connection is another one
    store.database.close()


@pytest.mark.parametrize("way", ["server", "client"])
def test_a_cut_at_any_byte_around_a_commit_neither_loses_nor_repeats_it(
    url: str, postgres: PostgresServer, way: Way
) -> None:
    """Each byte of the commit and its answer; of what leads up to it every 23rd."""
    cut = ByteCut(postgres.port)
    store = through(url, cut)
    cut.arm(way, math.inf)
    store.refusals.add({"late": 1})
    first, total = cut.before_commit[way] - 4, cut.passed[way]
    assert total - first > 15
    kept, failed = 1, 0
    # The transaction's number, which goes to the server, gets longer: so the end is looked for.
    for place in (*range(0, first, 23), *range(first, total + 9)):
        assert store.refusals.all() == {"late": kept}
        cut.arm(way, place)
        try:
            store.refusals.add({"late": 1})
            kept += 1
        except StoreError as error:
            assert not isinstance(error, OutcomeUnknown)
            failed += 1
        assert cut.has_cut or place >= total
    assert not cut.has_cut, "there are more bytes"
    assert store.refusals.all() == {"late": kept}
    # A commit's answer that is cut is looked up; what is asked for in vain was never done.
    assert failed > 0 if way == "server" else kept > total - first
    store.database.close()
    cut.stop()


def test_a_store_of_an_earlier_release_gets_the_columns_that_it_lacks(
    postgres: PostgresServer, url: str
) -> None:
    told = Figure("global", "hr10", "", 5, 50.0, 0, 0.5, 0.0, 0.5)
    with opened(url) as store, store.database.transaction():
        store.first.evaluations.put(3, 4, [told])
    for name in ("over_alone", "over_alone_half_width", "control_devices"):
        postgres.run(f"ALTER TABLE figures DROP COLUMN {name}", url.rsplit("/", 1)[1])
    for _ in range(2):
        with opened(url) as store:
            (found,) = store.first.evaluations.latest()
            assert as_json(found.figures[0]) == as_json(told)
            with store.database.transaction():
                store.first.evaluations.put(3, 4, [told])


@pytest.fixture
def two_servers(tmp_path: Path) -> Iterator[tuple[PostgresServer, PostgresServer, str]]:
    """A server with a store, and an older copy of it; the store's URL at the first one."""
    if PROGRAMS is None:
        pytest.skip(MISSING)
    folder = Path(tempfile.mkdtemp(prefix="tessera-copy-"))
    with running_postgres() as server:
        server.run("CREATE DATABASE fleet")
        create_database(server.url("fleet")).close()
        server.stop()
        older = server.copy(folder)
        server.start()
        older.start()
        yield server, older, server.url("fleet")
        older.stop()
    shutil.rmtree(folder)


def test_a_server_that_lacks_what_was_committed_is_refused_and_the_right_one_goes_on(
    two_servers: tuple[PostgresServer, PostgresServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, other, url = two_servers
    way = ByteCut(server.port)
    monkeypatch.setattr("aggregator.store.postgres._PATIENCE_SECONDS", 5.0)
    store = through(url, way)
    store.refusals.add({"kept": 1})
    asked: tuple[Callable[[], object], ...] = (
        lambda: store.refusals.add({"lost": 1}),
        store.refusals.all,
        store.database.now,
    )
    # First a copy of before, as a standby that was not synchronous; then another fleet's store.
    for said in ("an older copy", "another store"):
        before = other.run("SELECT * FROM refusals", "fleet")
        for ask in asked:
            way.lead_to(other.port)
            with pytest.raises(StoreError, match=said):
                ask()
            with pytest.raises(StoreError, match=said):  # not even the second time
                ask()
        with pytest.raises(StoreError), store.database.transaction():
            store.refusals.add({"lost": 1})
        assert other.run("SELECT * FROM refusals", "fleet") == before
        way.lead_to(server.port)
        store.refusals.add({"kept": 1})
        other.run("UPDATE tessera_store SET identity = 'another'", "fleet")
    assert store.refusals.all() == {"kept": 3}
    # In the midst of a transaction, and of a commit.
    with pytest.raises(StoreError), store.database.transaction():
        store.refusals.add({"lost": 1})
        way.lead_to(other.port)
    with pytest.raises(StoreError, match="another store"):
        store.refusals.all()
    way.lead_to(server.port)
    assert store.refusals.all() == {"kept": 3}
    store.database.close()
    way.stop()


def test_a_commit_that_nobody_can_look_up_is_an_error_of_its_own(
    url: str, cut: CommitCut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aggregator.store.postgres._PATIENCE_SECONDS", 0.3)
    store = through(url, cut)
    cut.arm("after", stays_dead=True)
    with pytest.raises(OutcomeUnknown, match="midst of a commit"):
        store.refusals.add({"late": 1})
    with pytest.raises(StoreError) as gone:
        store.refusals.add({"late": 1})
    assert not isinstance(gone.value, OutcomeUnknown), "this one was never begun"
    cut.dead = False
    assert store.refusals.all() == {"late": 1}, "who looks finds out"
    store.database.close()


def test_a_crash_of_the_server_takes_back_what_was_not_committed(
    url: str, postgres: PostgresServer
) -> None:
    with opened(url) as store:
        store.refusals.add({"kept": 1})
        with pytest.raises(StoreError), store.database.transaction():
            store.refusals.add({"lost": 1})
            postgres.crash()
            try:
                with pytest.raises(StoreError):
                    store.refusals.add({"too": 1})  # not outside of the transaction instead
                with pytest.raises(StoreError), store.database.transaction():
                    pass
            finally:
                postgres.start()
            store.refusals.add({"lost": 1})
        assert store.refusals.all() == {"kept": 1}
        store.database.changed_elsewhere()
        # Reading, and beginning to write, wait for a server that comes back.
        for ask in (lambda: store.refusals.add({"kept": 1}), store.refusals.all):
            postgres.crash()
            later = threading.Timer(0.3, postgres.start)
            later.start()
            ask()
            later.join(PATIENCE_SECONDS)
        assert store.refusals.all() == {"kept": 2}
        assert store.database.changed_elsewhere(), "nobody heard what was told meanwhile"


@pytest.mark.parametrize("last", ["begin", "execute", "many", "copy"])
def test_who_is_frozen_in_a_transaction_does_not_keep_others_waiting(url: str, last: str) -> None:
    frozen = f"{url}?options=-c%20idle_in_transaction_session_timeout%3D300ms"
    verdict = StoredVerdict(1, 1, b"a", bytes(32), None)
    steps: dict[str, Callable[[Store], object]] = {
        "begin": lambda store: None,
        "execute": lambda store: store.facts.put("frozen", 1),
        "many": lambda store: store.refusals.add({"frozen": 1}),
        "copy": lambda store: store.first.log.append([], [verdict]),
    }
    with opened(frozen) as one, opened(url) as other:
        with pytest.raises(StoreError, match="idle-in-transaction"), one.database.transaction():
            steps[last](one)
            other.refusals.add({"late": 1})  # waits until the server has cut the first one off
            one.facts.put("frozen", 2)
        assert other.refusals.all() == {"late": 1} and other.facts.get("frozen") is None
        one.refusals.add({"late": 1})


def test_who_is_frozen_in_the_midst_of_a_statement_does_not_keep_others_waiting(url: str) -> None:
    patience = "-c%20idle_in_transaction_session_timeout%3D300ms%20-c%20lock_timeout%3D300ms"
    impatient = f"{url}?options={patience}"

    def verdicts(waits: Callable[[], object]) -> Iterator[StoredVerdict]:
        yield StoredVerdict(1, 1, b"a", bytes(32), None)
        waits()  # in a COPY, which is neither over nor idle

    with opened(impatient) as one, opened(impatient) as other:
        with pytest.raises(StoreError):
            one.first.log.append([], verdicts(lambda: other.refusals.add({"late": 1})))
        assert other.refusals.all() == {"late": 1}
        one.refusals.add({"late": 1})
        assert other.refusals.all() == {"late": 2}


class SlowLine(Proxy):
    """Large messages trickle through."""

    def _forward(self, data: bytes, to: socket.socket) -> bool:
        for begin in range(0, len(data), 1 << 14):
            time.sleep(0.0 if len(data) < 1 << 15 else 0.1)
            to.sendall(data[begin : begin + (1 << 14)])
        return True


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_who_is_only_slow_gets_through(
    url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, is_waited_for: bool
) -> None:
    """A large value takes longer on its way than who is silent is left alone. The server ends such
    a session where it knows the statement already, and whoever waits for it in any case."""
    monkeypatch.setattr("aggregator.store.postgres._SILENT_SECONDS", 0.3)
    line, seconds = SlowLine(postgres.port), f"{url}?options=-c%20lock_timeout%3D300ms"
    with closing(through(url, line).database) as one, opened(seconds) as other:
        facts = Store(one).facts
        for _ in range(0 if is_waited_for else 8):  # psycopg prepares what comes often
            facts.put("large", b"a")
        other.database.waits = lambda problem: True
        beside = threading.Thread(target=lambda: other.refusals.add({"late": 1}))
        tries = 0
        while facts.get("large") != bytes(300_000):
            tries += 1
            with suppress(StoreError), one.transaction():
                if is_waited_for and beside.ident is None:
                    beside.start()
                facts.put("large", bytes(300_000))
        assert 1 < tries < 6
        if is_waited_for:
            beside.join(PATIENCE_SECONDS)
            assert other.refusals.all() == {"late": 1}
    line.stop()


def test_a_long_patience_of_the_server_s_is_none_of_ours_and_of_the_url_s_is(
    url: str, postgres: PostgresServer
) -> None:
    """Hosted servers come with a day. Whoever waits that long can be asked to end meanwhile."""
    day = "-c%20idle_in_transaction_session_timeout%3D24h%20-c%20lock_timeout%3D300ms"
    verdict = StoredVerdict(1, 1, b"a", bytes(32), None)
    postgres.run("ALTER SYSTEM SET idle_in_transaction_session_timeout = '24h'")
    try:
        postgres.run("SELECT pg_reload_conf()")
        query = "SHOW idle_in_transaction_session_timeout"
        wait_until(lambda: postgres.run(query) == [("1d",)])
        hasty = f"{url}?options=-c%20lock_timeout%3D300ms"
        with opened(hasty) as one, opened(f"{url}?options={day}") as other:
            assert one.database.row(query) == ("5s",)

            def verdicts() -> Iterator[StoredVerdict]:
                yield verdict
                with pytest.raises(StoreError, match="has been writing to it for long"):
                    one.refusals.add({"late": 1})

            other.first.log.append([], verdicts())
    finally:
        postgres.run("ALTER SYSTEM RESET idle_in_transaction_session_timeout")
        postgres.run("SELECT pg_reload_conf()")


def test_who_waits_for_a_session_that_cannot_be_ended_can_be_asked_to_end(
    url: str, postgres: PostgresServer
) -> None:
    patience = "-c%20idle_in_transaction_session_timeout%3D300ms%20-c%20lock_timeout%3D300ms"
    asked: list[str] = []
    with opened(f"{url}?options={patience}") as one, opened(f"{url}?options={patience}") as other:
        (pid,) = one.database.row("SELECT pg_backend_pid()") or ()
        other.database.waits = lambda problem: asked.append(problem) or len(asked) < 3  # type: ignore[func-returns-value]

        def verdicts() -> Iterator[StoredVerdict]:
            yield StoredVerdict(1, 1, b"a", bytes(32), None)
            os.kill(pid, signal.SIGSTOP)
            try:
                with pytest.raises(StoreError, match="has been writing to it for long"):
                    other.refusals.add({"late": 1})
            finally:
                os.kill(pid, signal.SIGCONT)

        with suppress(StoreError):  # where it was told to end before it stood still
            one.first.log.append([], verdicts())
    assert len(asked) == 3


def test_a_notification_in_the_midst_of_connecting_is_heard(
    url: str, postgres: PostgresServer
) -> None:
    name = url.rsplit("/", 1)[1]
    told = ToldConnecting(postgres.port, lambda: postgres.run("NOTIFY tessera_changes", name))
    with closing(through(url, told).database) as database:
        store = Store(database)
        assert told.times == 1 and database.changed_elsewhere()
        assert not database.changed_elsewhere()
        # And where the connection before it is gone.
        (pid,) = database.row("SELECT pg_backend_pid()") or ()
        postgres.run(f"SELECT pg_terminate_backend({pid})")
        assert store.refusals.all() == {}
        assert told.times == 2 and database.changed_elsewhere()
    told.stop()


# -- who waits for whom ----------------------------------------------------------------------------


def test_shared_ones_run_beside_each_other_and_one_alone_after_them(url: str) -> None:
    with opened(url) as one, opened(url) as other, opened(url) as third:
        began = threading.Event()

        def alone() -> None:
            with third.database.transaction():
                began.set()

        thread = threading.Thread(target=alone)
        with one.database.transaction(shared=True), other.database.transaction(shared=True):
            one.refusals.add({"one": 1})
            other.refusals.add({"other": 1})
            thread.start()
            assert not began.wait(0.3)
        thread.join(PATIENCE_SECONDS)
        assert began.is_set() and third.refusals.all() == {"one": 1, "other": 1}


def test_a_held_row_is_waited_for_by_who_would_hold_it(url: str) -> None:
    query = "SELECT count FROM refusals WHERE reason = 'late'"
    with opened(url) as one, opened(url) as other:
        one.refusals.add({"late": 1})
        found: list[object] = []

        def add_one() -> None:
            with other.database.transaction(shared=True):
                found.append(other.database.hold(query))

        thread = threading.Thread(target=add_one)
        with one.database.transaction(shared=True):
            assert one.database.hold(query) == (1,)
            thread.start()
            thread.join(0.3)
            assert not found
            one.refusals.add({"late": 1})
        thread.join(PATIENCE_SECONDS)
        assert found == [(2,)]
        with one.database.transaction(shared=True), other.database.transaction(shared=True):
            assert one.database.hold(query, shared=True) == (2,)
            assert other.database.hold(query, shared=True) == (2,)


def test_shared_commits_wake_nobody(url: str) -> None:
    with opened(url) as one, opened(url) as other:
        one.database.changed_elsewhere()
        with other.database.transaction(shared=True):
            other.refusals.add({"group": 1})
        other.database.execute("UPDATE refusals SET count = 5 WHERE reason = 'nothing like it'")
        other.refusals.add({"alone": 1})
        wait_until(one.database.changed_elsewhere)
        with other.database.transaction(shared=True):
            other.refusals.add({"group": 1})
        time.sleep(0.1)
        assert not one.database.changed_elsewhere()


# -- what is stored --------------------------------------------------------------------------------


def test_a_text_that_postgresql_cannot_hold_does_not_fail_the_group_that_it_is_in(url: str) -> None:
    with opened(url) as store:
        reports = [
            StoredReport(1, 1, b"a", "trained", "", "1.0", "", "li\0nux", "", None, None),
            StoredReport(1, 1, b"b", "failed", "disk", "1.0", "", "linux", "", None, None),
        ]
        store.first.reports.add(reports)
        assert store.first.reports.has(1, 1, b"a") and store.first.reports.has(1, 1, b"b")


def test_a_statement_that_failed_fails_the_transaction_even_where_nobody_looked(url: str) -> None:
    with opened(url) as store:
        with pytest.raises(StoreError), store.database.transaction():
            store.refusals.add({"late": 1})
            with pytest.raises(StoreError):
                store.database.execute("INSERT INTO refusals VALUES ('late', NULL)")
        assert store.refusals.all() == {}


def test_a_commit_is_on_disk_whatever_the_database_s_other_users_do_without(
    url: str, postgres: PostgresServer
) -> None:
    postgres.run(f"ALTER DATABASE {url.rsplit('/', 1)[1]} SET synchronous_commit = off")
    with opened(url) as store:
        assert store.database.row("SHOW synchronous_commit") == ("on",)


# -- what is refused -------------------------------------------------------------------------------


def refusal(ask: Callable[[], object]) -> str:
    with pytest.raises(AggregatorError) as refused:
        ask()
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    return str(refused.value)


def test_a_store_that_cannot_be_reached_is_named_without_its_password() -> None:
    port = free_port()
    said = refusal(lambda: open_database(f"postgresql://me:hush@127.0.0.1:{port}/fleet"))
    assert f"127.0.0.1:{port}, database fleet" in said and "hush" not in said
    assert said.count("?") == 1
    for unreadable in ("me:hush%zz@h/d", "me:hush@hush@h/d", "me:hush/hush@h/d", "%"):
        said = refusal(partial(open_database, f"postgresql://{unreadable}"))
        assert "hush" not in said and "postgresql://USER@HOST" in said


def test_no_password_is_shown_of_a_store_that_is_open(url: str) -> None:
    with opened(url.replace("tessera@", "tessera:hush@")) as store:
        database = store.database
        assert "hush" not in repr(database) + database.where and "127.0.0.1" in database.where


def test_a_server_that_asks_for_a_password_was_reached(
    url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hba = Path(postgres.run("SHOW hba_file")[0][0])
    hba.write_text(f"host all locked 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
    postgres.run("CREATE ROLE locked LOGIN PASSWORD 'right'")
    postgres.run("SELECT pg_reload_conf()")
    monkeypatch.setenv("PGPASSFILE", "/dev/null")
    for role in ("locked", "locked:hush"):
        asked = url.replace("tessera@", f"{role}@")
        wait_until(lambda url=asked: "does not let us in" in refusal(lambda: open_database(url)))
        said = refusal(lambda url=asked: open_database(url))
        assert "PGPASSFILE" in said and "Is it running" not in said and "hush" not in said


def test_what_is_sent_to_another_machine_is_sent_to_the_right_one() -> None:
    for host in ("db.example", "10.0.0.3", "localhost,db.example"):
        database = f"postgresql://{host}/fleet"
        assert settings_of(database)["sslmode"] == "verify-full"
        given = f"{database}?sslmode=require"
        assert settings_of(given)["sslmode"] == "require"
    for local in ("127.0.0.1", "localhost", "", "%2Frun%2Fpostgresql"):
        assert "sslmode" not in settings_of(f"postgresql://{local}/fleet")


def test_a_database_that_holds_something_else_is_left_alone(
    make_database: MakeDatabase, postgres: PostgresServer, url: str
) -> None:
    empty = make_database()
    assert "store --move brings" in refusal(lambda: open_database(empty))
    assert "in another database" in refusal(lambda: open_database(empty, identity="of-a-home"))
    postgres.run("CREATE TABLE devices (id BIGINT)", empty.rsplit("/", 1)[1])
    assert "no aggregator's" in refusal(lambda: open_database(empty))
    for taken in (empty, url):
        assert "is not empty" in refusal(partial(create_database, taken))
    assert "does not exist" in refusal(lambda: open_database(postgres.url("nowhere")))


def test_another_fleet_s_store_is_refused(tmp_path: Path, make_database: MakeDatabase) -> None:
    one = make_home(tmp_path / "one", "mqtt://127.0.0.1:1", store_url=make_database())
    other = make_home(tmp_path / "other", "mqtt://127.0.0.1:1", store_url=make_database())
    one.store_url, other.store_url = other.store_url, one.store_url
    for home in (one, other):
        assert "another fleet's" in refusal(home.open_store)


def test_a_home_that_does_not_say_which_store_is_its_own_takes_none(
    tmp_path: Path, make_database: MakeDatabase
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", store_url=make_database())
    said = home.store_identity.read_text()
    home.store_identity.write_text("")
    assert "store.id is empty" in refusal(home.open_store)
    home.store_identity.write_text(said)
    home.open_store().database.close()


def test_a_role_without_rights_is_told(url: str, postgres: PostgresServer) -> None:
    name = url.rsplit("/", 1)[1]
    role = f"stranger_{os.getpid()}"
    postgres.run(f"CREATE ROLE {role} LOGIN")
    try:
        as_stranger = url.replace("tessera@", f"{role}@")
        assert "role that the URL names" in refusal(lambda: open_database(as_stranger))
        postgres.run(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}", name)
        assert "may not read and write" in refusal(lambda: open_database(as_stranger))
        assert "role that the URL names" in refusal(
            lambda: create_database(postgres.url("postgres").replace("tessera@", f"{role}@"))
        )
    finally:
        postgres.run(f"DROP OWNED BY {role}", name)
        postgres.run(f"DROP ROLE {role}")


def test_a_server_that_may_lose_what_it_commits_is_refused(
    url: str, postgres: PostgresServer
) -> None:
    try:
        postgres.run("ALTER SYSTEM SET fsync = off")
        postgres.run("SELECT pg_reload_conf()")
        wait_until(lambda: postgres.run("SHOW fsync") == [("off",)])
        assert "fsync = off" in refusal(lambda: open_database(url))
    finally:
        postgres.run("ALTER SYSTEM RESET fsync")
        postgres.run("SELECT pg_reload_conf()")
        wait_until(lambda: postgres.run("SHOW fsync") == [("on",)])


def test_an_older_server_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aggregator.store.postgres.OLDEST_SERVER", 99)
    assert "PostgreSQL 99 or newer" in refusal(lambda: open_database(url))


# -- versions --------------------------------------------------------------------------------------


def test_a_newer_store_is_refused(url: str, postgres: PostgresServer) -> None:
    name = url.rsplit("/", 1)[1]
    postgres.run(f"UPDATE tessera_store SET version = {SCHEMA_VERSION + 1}", name)
    assert "install the newer version" in refusal(lambda: open_database(url))


def test_a_process_whose_store_another_version_took_over_writes_no_more(
    url: str, postgres: PostgresServer
) -> None:
    with opened(url) as store:
        name = url.rsplit("/", 1)[1]
        postgres.run(f"UPDATE tessera_store SET version = {SCHEMA_VERSION + 1}", name)
        with pytest.raises(StoreError, match="another version"):
            store.refusals.add({"late": 1})


# -- who needs it ----------------------------------------------------------------------------------


def test_nothing_of_it_is_imported_for_a_store_in_a_file() -> None:
    python(
        "import sys, aggregator.home, aggregator.serve.service; assert 'psycopg' not in sys.modules"
    )


def test_without_psycopg_the_extra_is_named() -> None:
    said = python(
        "import sys; sys.modules['psycopg'] = None\n"
        "from aggregator.store import open_database\n"
        "from aggregator.errors import AggregatorError\n"
        "try: open_database('postgresql://127.0.0.1/fleet')\n"
        "except AggregatorError as error: print(error)"
    )
    assert "pip install 'tessera-edge[cluster]'" in said


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
