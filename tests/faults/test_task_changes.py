"""kill -9 of a command, and of ``serve``, between any two steps of adding, replacing and retiring a
task: the home is as before or as after, and what was asked for is done by the next life."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from aggregator.cli import main
from aggregator.home import AggregatorHome
from aggregator.keys.folder import current_descriptor
from aggregator.serve.service import Service
from device_sdk.evaluation.report import write_evaluations
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.catalogue import catalogue_id
from device_sdk.wire.publish.content import SHARED, open_content_head
from device_sdk.wire.publish.manifest import ChunkSet
from device_sdk.wire.publish.receipts import RecordType, UpdateIdentity, with_report, write_update
from device_sdk.wire.publish.report import Details, Report, ReportedOutcome
from device_sdk.wire.publish.topics import ChunkTopic, Topics
from device_sdk.wire.seal.broadcast import find_group_key, read_manifest_label
from device_sdk.wire.seal.signature import public_key
from tests.aggregator.rounds.test_evaluator import ranked
from tests.fakes.homes import make_home
from tests.fakes.parts import enrol, parts_of
from tests.fakes.scatter_updates import one_user
from tests.fakes.tasks import add_task, task_text
from tests.faults.crash_points import TASK_POINTS, arm, at_each_passage

DEVICES = [bytes([place]) * 16 for place in (1, 2)]
ROUND = "quorum = 1\nwait_for_devices = 2\ndeadline_seconds = 900.0"
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Seen:
    """What a home holds of the task ``air``, and whether all of it is there."""

    state: str | None
    served: bool
    generation: int
    version: int | None
    width: int | None
    waiting: int
    """Updates that are counted and part of no version."""
    open_round: bool
    published: bool
    told: tuple[int, ...]
    """Rows of what devices told of rounds and said of versions, of figures and of versions."""


def seen(home: AggregatorHome) -> Seen:
    store = home.open_store()
    row = store.tasks.named("air")
    if row is None:
        store.database.close()
        return Seen(None, False, 0, None, None, 0, False, False, ())
    task = store.task(row.number)
    checkpoint, latest = task.checkpoints.get("version"), task.rounds.latest()
    found = Seen(
        row.state,
        row.served is not None,
        task.facts.own_generation,
        None if checkpoint is None else checkpoint.version,
        None if checkpoint is None else int(checkpoint.state["items"].shape[1]),
        sum(1 for _ in task.log.after(0)),
        bool(latest) and latest[0].closed_unix_seconds is None,
        bool(task.publications.topics("round")),
        tuple(
            store.database.row(f"SELECT count(*) FROM {table} WHERE task = ?", (row.number,))[0]
            for table in ("reports", "device_evaluations", "figures", "versions")
        ),
    )
    assert store.database.row("PRAGMA integrity_check") == ("ok",)
    store.database.close()
    return found


def serve(home: AggregatorHome, turns: int = 2) -> None:
    """A short life, without a broker."""
    parts = parts_of(home)
    service = Service(parts)
    parts.tasks.look_again()
    for _ in range(turns):
        service._tick()
    parts.store.database.close()


def count_one(home: AggregatorHome) -> None:
    """An update of one of the two devices is counted in the open round of ``air``, and what it
    told and found out is noted."""
    parts = parts_of(home)
    air = parts.tasks.served[1]
    row = air.rounds.current
    assert row is not None
    tensors = one_user(8, range(2), np.ones(2), 1.0, range(3))
    identity = UpdateIdentity(DEVICES[0], "air", row.generation, row.round)
    body = encode_scatter_update(Update(1, tensors), 8, "float32")
    said = write_evaluations(ranked(np.arange(4)))
    report = Report(ReportedOutcome.TRAINED, "", Details("1", "1", "linux", "k=3"), said)
    payload = write_update(identity, with_report(encode(report), body))
    assert parts.inbox.offer(DEVICES[0], payload, RecordType.CONTRIBUTION) is None
    (settled,) = air.ingest.commit()
    assert settled.receipt.verdict.value == "counted"
    parts.store.database.close()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> AggregatorHome:
    """With two tasks, the second in the midst of a round."""
    home = make_home(tmp_path_factory.mktemp("tasks"), "mqtt://127.0.0.1:1", ROUND)
    enrol(home, DEVICES)
    add_task(home, "air", f"{text_of(home, 'air')}[evaluation]\n")
    serve(home)
    count_one(home)
    return home


def text_of(home: AggregatorHome, name: str, width: int = 8) -> str:
    """A task over the first one's very catalogue."""
    text = task_text(home, name, ROUND, width=width)
    assert f'"{name}.tsv"' in text
    return text.replace(f'"{name}.tsv"', '"items.tsv"')


def require_readable(home: AggregatorHome) -> None:
    """Whoever has a round to take part in finds its catalogue, sealed for him or for all tasks."""
    store = home.open_store()
    topics = Topics("tessera")
    for row in store.tasks.all():
        task = store.task(row.number)
        if not task.publications.topics("round") or task.facts.catalogue is None:
            continue
        content_id = catalogue_id(task.facts.catalogue)

        def message(index: int, content_id: bytes = content_id) -> bytes:
            found = store.retained.message(topics.write(ChunkTopic(content_id, index)))
            assert found is not None
            return found

        label = read_manifest_label(message(0))
        key = find_group_key(store.secrets.group_keys(), label.epoch)
        names = ((row.name or "", "all"), SHARED)
        signing = public_key(current_descriptor(store).signing)
        head, keys = open_content_head(message(0), key, names, signing)
        chunks = ChunkSet(keys, label.broadcast_id, head.chunks, head.length)
        for index in range(len(head.chunks)):
            chunks.add(message(index + 1))
        assert chunks.plaintext() == task.facts.catalogue
    store.database.close()


def in_a_fork(home: AggregatorHome, prepare: Callable[[], None], *arguments: str) -> int | None:
    """Run a command, or ``serve`` without arguments, in a process of its own; its exit code."""

    def work() -> None:
        os.close(1)
        os.open(os.devnull, os.O_WRONLY)
        prepare()
        if arguments:
            main(["task", "--home", str(home.folder), *arguments])
        else:
            serve(home)

    process = _FORK.Process(target=work)
    process.start()
    process.join()
    return process.exitcode


def killed(home: AggregatorHome, point: str, calls: int, *arguments: str) -> bool:
    """Run it in a process that dies at a point; whether it came to that."""
    code = in_a_fork(home, lambda: arm(point, calls), *arguments)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def passages(home: AggregatorHome, *arguments: str) -> Counter[str]:
    """How often it passes each point where nothing kills it."""
    found, told = _FORK.Pipe(duplex=False)

    def tell_each() -> None:
        for point in TASK_POINTS:
            at_each_passage(point, lambda point=point: told.send(point))  # type: ignore[misc]

    with found, told:
        assert in_a_fork(home, tell_each, *arguments) == 0
        counted = Counter[str]()
        while found.poll():
            counted[found.recv()] += 1
    return counted


WIDER = "columns = 12"
BEFORE = Seen("active", True, 0, 0, 8, 1, True, True, (1, 1, 0, 1))


def wishes(home: AggregatorHome, what: str, name: str) -> bool:
    """Whether the home says that the change is to be made."""
    store = home.open_store()
    row = store.tasks.named(name)
    store.database.close()
    if row is None or what == "add":
        return row is not None
    return row.state == "retiring" if what == "retire" else row.request is not None


def is_after(what: str, found: Seen) -> bool:
    """Whether all of a change was made to the task that there was."""
    if what == "retire":
        nothing = (0, 0, 0, 0)
        generation = found.generation
        return found == Seen("retired", False, generation, None, None, 0, False, False, nothing)
    if what == "replace":
        made = (found.state, found.version, found.width, found.waiting) == ("active", 1, 12, 0)
        # What was told stays, what was said of the version before goes; the new version is noted
        # as the task is made anew.
        told = found.told in ((1, 0, 0, 1), (1, 0, 0, 2))
        return made and found.generation > 0 and told
    return found == BEFORE


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["add", "replace", "retire"])
def test_a_death_at_any_point_leaves_the_home_before_or_after(
    template: AggregatorHome, tmp_path: Path, what: str
) -> None:
    name = "water" if what == "add" else "air"
    file = tmp_path / f"{name}.toml"
    options = {"add": ("--from", str(file)), "replace": ("--from", str(file), "--now")}
    command = (what, name, *options.get(what, ()))

    def copy(named: str) -> AggregatorHome:
        home = AggregatorHome(tmp_path / named)
        shutil.copytree(template.folder, home.folder)
        file.write_text(text_of(home, name, width=12))
        return home

    undisturbed = copy("undisturbed")
    passed = [passages(undisturbed, *command), passages(undisturbed)]
    assert is_after(what, seen(undisturbed))
    _require_all(undisturbed, what, name)
    deaths = 0
    for number, point in enumerate(TASK_POINTS):
        # A point that is not passed so often lets both live as undisturbed.
        for calls in range(1, 1 + min(2, max(each[point] for each in passed))):
            home = copy(f"{number}-{calls}")
            assert seen(home) == BEFORE
            died = killed(home, point, calls, *command)
            asked = wishes(home, what, name)
            assert asked or died
            # A command by itself changes nothing of what is served.
            assert replace(seen(home), state="active") == BEFORE
            died += killed(home, point, calls)
            deaths += died
            require_readable(home)
            found = seen(home)
            assert replace(found, state="active") == BEFORE or is_after(what, found), (point, found)
            serve(home)
            require_readable(home)
            found = seen(home)
            assert is_after(what, found) if asked else found == BEFORE, (point, found)
            if asked:
                _require_all(home, what, name)
    assert deaths >= {"add": 6, "replace": 6, "retire": 4}[what]


def _require_all(home: AggregatorHome, what: str, name: str) -> None:
    store = home.open_store()
    row = store.tasks.named(name)
    assert row is not None and row.unwritten is None and row.request is None
    assert row.problem is None
    if what == "retire":
        assert not store.retained.message("tessera/all/manifest/air/all")
        assert store.database.row("SELECT count(*) FROM verdicts") == (0,)
    else:
        assert WIDER in (row.served or "") and WIDER in (home.folder / row.file).read_text()
        assert store.task(row.number).rounds.latest()[0].closed_unix_seconds is None
    store.database.close()
