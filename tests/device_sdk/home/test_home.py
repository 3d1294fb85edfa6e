"""The home folder's stores, alone."""

from __future__ import annotations

import _sqlite3
import ctypes
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from device_sdk.artifact import FileEntry
from device_sdk.artifact.submodels import Submodel
from device_sdk.errors import HomeBroken, HomeLocked
from device_sdk.evaluation.report import Evaluation, EvaluationReport
from device_sdk.home.database import SCHEMA_VERSION, HomeDatabase
from device_sdk.home.home import Home
from device_sdk.home.model_store import CapabilityRow, StoredModel
from device_sdk.home.round_store import OutboxRow, Participation, RoundOutcome, StoredEvaluation
from device_sdk.rounds.session import AggregatorTime
from device_sdk.wire.publish.receipts import Receipt, Verdict
from device_sdk.world import Pace
from tests.fakes.handmade import linear_parts

NAMES = st.text(min_size=1, max_size=12).filter(lambda text: "\x00" not in text and _is_utf8(text))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    opened = Home(tmp_path / "home", create=True)
    yield opened
    opened.close()


def test_values_that_artifacts_share_are_kept_while_one_needs_them_and_never_taken_changed(
    home: Home,
) -> None:
    content = b"frozen"
    digest = hashlib.sha256(content).digest()
    assert not home.has_shared(digest)
    home.save_shared(digest, content)
    assert home.has_shared(digest)
    home.shared_file(digest).write_bytes(b"others")
    assert not home.has_shared(digest)
    home.save_shared(digest, content)
    needs = replace(
        linear_parts()[0], submodel=Submodel(1, 2, "0" * 64), shared=FileEntry.of(content)
    )
    artifact = bytes.fromhex(needs.id)
    home.artifact_folder(artifact).mkdir()
    (home.artifact_folder(artifact) / "manifest.json").write_bytes(needs.to_json())
    home.models.save_learner("task", {}, artifact)
    home.clean()
    assert home.has_shared(digest)
    home.models.save_learner("task", {}, None)
    home.clean()
    assert not home.has_shared(digest) and not home.artifact_folder(artifact).exists()


def test_contents_go_with_the_last_task_that_they_are_on_their_way_for(home: Home) -> None:
    """Whatever of them had come when a process was killed: values without artifacts, half a file;
    and another task's are left."""
    digest, artifact, other = (hashlib.sha256(each).digest() for each in (b"v", b"a", b"o"))
    home.tasks.set_served({"one": "", "two": ""})
    home.tasks.set_artifacts("one", [artifact, digest])
    home.tasks.set_artifacts("two", [other, digest])
    home.save_shared(digest, b"v")
    for left in (digest, artifact):
        home.shared_file(left).with_name(f".{left.hex()}.safetensors.partial").write_bytes(b"")
    home.artifact_folder(artifact).with_name(f".{artifact.hex()}.partial").mkdir()
    (home.shared_file(digest).parent / "notes").write_text("the owner's")
    home.tasks.set_served({"two": ""})
    home.clean()
    assert home.has_shared(digest), "the other task fetches what takes them"
    home.tasks.set_served({})
    home.clean()
    assert [each.name for each in home.shared_file(digest).parent.iterdir()] == ["notes"]


def test_what_cannot_be_read_in_a_contents_place_is_removed_and_comes_again(home: Home) -> None:
    digest = hashlib.sha256(b"v").digest()
    home.shared_file(digest).mkdir(parents=True)
    (home.shared_file(digest) / "lost+found").mkdir()
    assert not home.has_shared(digest)
    home.save_shared(digest, b"v")
    assert home.has_shared(digest)
    home.artifact_folder(digest).write_bytes(b"")
    assert not home.has_artifact(digest)
    assert home.save_artifact(digest, {}).is_dir()


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(NAMES, NAMES), max_size=30), cut=st.integers(0, 30))
def test_interactions_are_a_set_and_users_keep_their_place(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], cut: int
) -> None:
    home = Home(tmp_path_factory.mktemp("store") / "home", create=True)
    try:
        store = home.interactions
        news = store.add(pairs[:cut])
        first = {user: store.place(user) for user, _ in pairs[:cut]}
        news += store.add(pairs[cut:])
        assert news == len(set(pairs))
        assert store.add(pairs) == 0
        users = list(dict.fromkeys(user for user, _ in pairs))
        assert store.counts() == (len(users), len(set(pairs)))
        assert [store.place(user) for user in users] == list(range(len(users)))
        assert all(store.place(user) == place for user, place in first.items())
        known = sorted({item for _, item in pairs})[::2]
        rows = {item: 10 * n for n, item in enumerate(known)}
        positives = store.positives(rows)
        for place, user in enumerate(users):
            wanted = sorted(rows[item] for who, item in set(pairs) if who == user and item in rows)
            assert positives[place].tolist() == wanted
            assert set(store.items_of(place)) == {item for who, item in pairs if who == user}
    finally:
        home.close()


@pytest.mark.parametrize("pair", [("", "a"), ("a", ""), ("a", "b" * 257), ("ä" * 129, "b")])
def test_texts_that_cannot_be_kept_are_refused_whole(home: Home, pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"expected a text|more than 256 bytes"):
        home.interactions.add([("good", "one"), pair])
    assert home.interactions.counts() == (0, 0)


def test_a_transaction_is_all_or_nothing(home: Home) -> None:
    home.interactions.add([("anna", "one")])
    row = OutboxRow(bytes(32), "t", 1, 1, b"body")
    with pytest.raises(ZeroDivisionError), home.database.transaction():
        home.interactions.add([("anna", "two")])
        home.rounds.post(row)
        raise ZeroDivisionError
    assert home.rounds.outbox() == [] and home.interactions.counts() == (1, 1)
    home.rounds.post(row)
    with pytest.raises(sqlite3.IntegrityError):
        home.rounds.post(OutboxRow(os.urandom(32), "t", 1, 1, b"another body"))
    assert home.rounds.outbox() == [row]


def test_a_round_ends_once_and_its_receipt_settles_it(home: Home) -> None:
    part = Participation("t", 1, 1, 0, RoundOutcome.TRAINED, k=4, train_seconds=0.5)
    home.rounds.conclude(part)
    with pytest.raises(sqlite3.IntegrityError):
        home.rounds.conclude(Participation("t", 1, 1, 0, RoundOutcome.FAILED))
    row = OutboxRow(os.urandom(32), "t", 1, 1, b"body")
    home.rounds.post(row)
    assert home.rounds.last() == part and home.rounds.last_receipted() is None
    assert home.rounds.settle(Receipt(os.urandom(32), Verdict.COUNTED)) is None
    receipt = Receipt(row.digest, Verdict.REFUSED, "joined-later")
    assert home.rounds.settle(receipt) == row
    assert home.rounds.settle(receipt) is None
    settled = home.rounds.last_receipted()
    assert (settled.verdict, settled.reason) == (Verdict.REFUSED, "joined-later")


def test_old_rounds_are_forgotten_but_not_those_without_a_receipt(home: Home) -> None:
    with home.database.transaction():
        home.rounds.conclude(Participation("t", 1, 0, 0, RoundOutcome.TRAINED))
        for number in range(1, 1100):
            home.rounds.conclude(Participation("t", 1, number, 0, RoundOutcome.NOT_SELECTED))
    (count,) = home.database.row("SELECT count(*) FROM participation") or (None,)
    assert count == 1001
    assert home.rounds.participation("t", 1, 0) is not None


@pytest.mark.parametrize("half", [True, False])
def test_models_and_learners_come_back_bit_for_bit(home: Home, half: bool) -> None:
    rng = np.random.default_rng(0)
    items = rng.standard_normal((50, 8), dtype=np.float32)
    # Values that overflow float16, or look like its own for long, keep all their bits.
    items[0, 0], items[:, 1] = 1e6, 0.5
    halves = items.clip(-100, 100).astype(np.float16)
    if half:
        items = halves.astype(np.float32)
    arrays = {"items": items, "float16": halves, "empty": items[:0]}
    arrays["late"] = np.append(np.full(100, -0.0, np.float32), np.float32(0.1 if not half else 0.5))
    home.models.save_model(StoredModel("t", 1, 2, 3, bytes(32), arrays))
    ((size,),) = home.database.rows("SELECT length(arrays) FROM model")
    assert isinstance(size, int) and (size < 2200) == half, "as float16 where that loses nothing"
    state = {"users": rng.standard_normal((3, 8), dtype=np.float32), "pool": np.arange(4)}
    home.models.save_learner("t", state)
    model, learner = home.models.model("t"), home.models.learner("t")
    assert model is not None and learner is not None
    for wanted, found in ((arrays, model.arrays), (state, learner)):
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert found[name].tobytes() == array.tobytes() and found[name].flags.writeable
    assert home.models.model_mark("t") == (1, 2, 3)
    assert home.models.model("other") is None and home.models.learner("other") is None
    row = CapabilityRow("t", "c", "8", 10, "device", 4, 0, "because", 0.25)
    home.models.save_capability(row)
    assert home.models.capability("t") == row


def test_arrays_that_are_not_finite_are_refused_and_the_last_ones_stay(home: Home) -> None:
    home.models.save_learner("t", {"users": np.ones(2, np.float32)})
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="'users': a value is not finite"):
            home.models.save_learner("t", {"users": np.array([1, value], np.float32)})
    learner = home.models.learner("t")
    assert learner is not None and learner["users"].tolist() == [1, 1]
    # Larger than what may travel: Adam's squares of gradients of raw numbers.
    home.models.save_learner("t", {"squares": np.array([1e30], np.float32)})
    learner = home.models.learner("t")
    assert learner is not None and learner["squares"] == np.float32(1e30)


def test_a_damaged_row_is_told_from_a_bug(home: Home) -> None:
    home.models.save_learner("t", {"users": np.ones(2, np.float32)})
    home.database.row("UPDATE learner SET state = substr(state, 1, length(state) - 1)")
    with pytest.raises(HomeBroken, match="stored arrays are damaged"):
        home.models.learner("t")


def test_catalogues_that_no_model_uses_are_dropped(home: Home) -> None:
    kept, dropped = b"kept", b"dropped"
    home.models.save_catalogue(kept)
    home.models.save_catalogue(dropped)
    kept_id = hashlib.sha256(kept).digest()
    home.models.save_model(StoredModel("t", 1, 1, 1, kept_id, {"w": np.ones(1)}))
    assert home.models.catalogue(kept_id) == kept
    assert home.models.catalogue(hashlib.sha256(dropped).digest()) is None


def test_what_was_deleted_is_not_left_in_the_file(home: Home) -> None:
    secret = b"a-body-that-nobody-should-find" * 20
    row = OutboxRow(os.urandom(32), "t", 1, 1, secret)
    home.rounds.post(row)
    home.rounds.settle(Receipt(row.digest, Verdict.COUNTED))
    home.close()
    for path in home.folder.iterdir():
        assert secret[:60] not in path.read_bytes(), path


def test_the_largest_time_never_falls(home: Home) -> None:
    for value, expected in ((100, 100), (50, 100), (200, 200)):
        home.membership.raise_time(value)
        assert home.membership.signed_time() == expected


@pytest.mark.parametrize(
    ("pragma", "message"),
    [
        (f"user_version = {SCHEMA_VERSION + 1}", "install the newer one that made it"),
        ("application_id = 0", "by a development version .* enrol this device again"),
    ],
)
def test_a_home_of_another_version_is_refused_and_left_alone(
    tmp_path: Path, pragma: str, message: str
) -> None:
    path = tmp_path / "device.sqlite"
    HomeDatabase(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute(f"PRAGMA {pragma}")
    connection.close()
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(HomeBroken, match=message):
            HomeDatabase(path, read_only=read_only)
        assert path.read_bytes() == before


def test_a_reader_writes_nothing(home: Home) -> None:
    reader = Home(home.folder, read_only=True)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.interactions.add([("anna", "one")])
    home.interactions.add([("anna", "one")])
    assert reader.interactions.counts() == (1, 1)
    reader.close()


def test_two_homes_of_one_process_are_kept_apart_too(home: Home) -> None:
    with pytest.raises(HomeLocked, match=f"process {os.getpid()}"):
        Home(home.folder)


@given(
    steps=st.lists(
        st.tuples(
            st.floats(0, 1e6),
            st.sampled_from(["reply", "live", "shown", "descriptor"]),
            st.integers(0, 2**40),
        ),
        max_size=20,
    ),
    signed=st.integers(0, 2**40),
)
def test_what_was_signed_and_what_time_it_is_are_apart(
    steps: list[tuple[float, str, int]], signed: int
) -> None:
    """Whatever was said before, a reply is believed; what is stored rises by signed times alone,
    and begins anew with a descriptor."""
    now = 0.0
    time = AggregatorTime(lambda: now, signed)
    assert time.now() is None and time.unix_seconds() == signed
    for passed, what, unix_seconds in steps:
        before = time.now()
        now += passed
        if what == "reply":
            time.replied(unix_seconds)
            assert time.now() == pytest.approx(unix_seconds)
            assert time.is_fresh
        elif what == "descriptor":
            time.descriptor_began(unix_seconds)
            signed = unix_seconds
        else:
            time.opened(unix_seconds, now, live=what == "live")
            if before is not None:
                assert (time.now() or 0.0) >= unix_seconds - 1e-3
        signed = max(signed, unix_seconds)
        assert time.signed_unix_seconds == signed
        assert time.largest_unix_seconds >= signed


@given(
    fast=st.floats(-0.015, 0.015),
    rounds=st.integers(1, 400),
    every_seconds=st.floats(60, 600),
)
def test_a_clock_that_runs_fast_or_slow_keeps_to_live_manifests(
    fast: float, rounds: int, every_seconds: float
) -> None:
    """For as long as sessions last, and longer: no deadline seems over that is not."""
    real, base = 0.0, 1_700_000_000
    time = AggregatorTime(lambda: real * (1 + fast), 0)
    time.replied(base)
    for _ in range(rounds):
        real += every_seconds
        time.opened(int(base + real), real * (1 + fast), live=True)
        assert time.now() == pytest.approx(base + real, abs=1.5)


def test_an_old_manifest_shown_as_if_it_were_new_takes_time_back_by_2_percent_at_most() -> None:
    now = 0.0
    time = AggregatorTime(lambda: now, 0)
    time.replied(1_000_000)
    now = 3600.0
    time.opened(1_000_000 - 50_000, now, live=True)
    assert time.now() == pytest.approx(1_000_000 + 3600 * 0.98)


@pytest.mark.parametrize(
    "values", [{"answer_seconds": 0.0}, {"most_seconds": 1.0}, {"unanswered_sends": -1}]
)
def test_a_pace_that_makes_no_sense_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Pace(**values)  # type: ignore[arg-type]


def test_the_counter_of_requests_rises_over_restarts_by_growing_steps(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    seen = [0]
    for unanswered in range(40):
        home = Home(folder, create=True)
        seen.append(home.requests.next())
        assert seen[-1] - seen[-2] == min(16**unanswered, 2**32)
        home.close()
    home = Home(folder)
    home.requests.answered()
    assert home.requests.next() == seen[-1] + 1 and home.requests.next() == seen[-1] + 17
    # Never beyond what SQLite keeps, whatever somebody wrote there: requests are refused then.
    home.database.row(f"UPDATE request_counter SET highest = {2**63 - 2}")
    assert [home.requests.next() for _ in range(3)] == [2**63 - 1] * 3
    home.close()


def test_a_models_names_are_kept_whatever_they_are(home: Home) -> None:
    arrays: dict[str, NDArray[Any]] = {
        "Linear.Weight": np.ones(2, np.float32),
        "0": np.arange(3),
    }
    home.models.save_learner("t", arrays, b"a" * 32)
    assert home.models.learner_artifact("t") == b"a" * 32
    found = home.models.learner("t")
    assert found is not None and set(found) == set(arrays)
    np.testing.assert_array_equal(found["0"], arrays["0"])
    model = StoredModel("t", 1, 2, 3, bytes(32), arrays, b"a" * 32)
    home.models.save_model(model)
    again = home.models.model("t")
    assert again is not None and again.artifact_id == b"a" * 32 and set(again.arrays) == set(arrays)


def test_attachments_are_kept_while_they_are_offered(home: Home) -> None:
    ids = [bytes([n]) * 32 for n in range(3)]
    for content_id in ids:
        home.attachments.save("t", content_id, content_id[:4])
        home.attachments.save("other", content_id, b"")
    home.attachments.keep_only("t", ids[1:])
    assert home.attachments.ids("t") == set(ids[1:])
    assert home.attachments.content("t", ids[0]) is None
    assert home.attachments.content("t", ids[1]) == ids[1][:4]
    assert home.attachments.ids("other") == set(ids)


def _sqlite_bytes() -> int:
    """What SQLite holds in this process, its pages of the file included."""
    library = ctypes.CDLL(_sqlite3.__file__)
    if not hasattr(library, "sqlite3_memory_used"):
        pytest.skip("this SQLite does not tell how much memory it uses")
    library.sqlite3_memory_used.restype = ctypes.c_int64
    return int(library.sqlite3_memory_used())


def test_the_memory_of_an_open_home_does_not_grow_with_its_rounds(home: Home) -> None:
    def take_part(rounds: range) -> int:
        for number in rounds:
            with home.database.transaction():
                part = Participation("default", 1, number, 0, RoundOutcome.TRAINED, "x" * 300)
                home.rounds.conclude(part)
                home.rounds.post(OutboxRow(number.to_bytes(32), "default", 1, number, bytes(900)))
            home.rounds.settle(Receipt(number.to_bytes(32), Verdict.COUNTED))
        return _sqlite_bytes()

    before = take_part(range(1, 100))
    assert take_part(range(100, 600)) - before < 20_000


def test_the_item_recorded_last_is_known_for_each_user(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", create=True)
    store = home.interactions
    store.add([("ann", "z"), ("bob", "b"), ("ann", "a"), ("ann", "z")])
    rows = {"z": 0, "a": 1, "b": 2, "m": 3}
    assert store.latest(rows)[0].tolist() == [1, 2], "what is touched again stays where it was"
    store.add([("ann", "unknown"), ("ann", "m")])
    assert store.latest(rows)[0].tolist() == [3, 2]
    home.close()
    home = Home(tmp_path / "home")
    home.interactions.add([("bob", "z"), ("ann", "m"), ("eve", "unknown")])
    assert home.interactions.latest(rows)[0].tolist() == [3, 0, -1]
    home.close()


def test_the_last_evaluation_is_kept(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", create=True)
    loss = Evaluation("global", "loss", np.array([4.0, 1.0]))
    for number in (3, 4):
        report = EvaluationReport((loss,), "out-of-time")
        home.rounds.save_evaluation(StoredEvaluation("t", 1, number, 2, report, "too slow"))
    home.close()
    home = Home(tmp_path / "home", read_only=True)
    found = home.rounds.evaluation("t")
    assert found is not None and (found.round, found.version, found.detail) == (4, 2, "too slow")
    assert found.report.reason == "out-of-time" and found.report.results[0].value == 0.25
    assert home.rounds.evaluation("other") is None
    home.close()
