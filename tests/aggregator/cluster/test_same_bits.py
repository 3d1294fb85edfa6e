"""The same updates give the same model, bit for bit, over any workers and on either store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from aggregator.errors import StoreAway
from aggregator.home import AggregatorHome
from aggregator.rounds.machine import RoundClosed, RoundOpened
from aggregator.store.rows import RoundRow
from device_sdk.evaluation.report import Evaluation, EvaluationReport, write_evaluations
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.receipts import (
    RecordType,
    UpdateIdentity,
    with_report,
    write_update,
)
from device_sdk.wire.publish.report import Report, ReportedOutcome
from tests.fakes.averaging import BROKER, averaged, averaging_home
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import ITEMS, WIDTH, make_home
from tests.fakes.scatter_updates import users
from tests.fakes.sealed_rounds import Bodies, Device, Played, SealedRounds, play
from tests.servers.fixtures import MakeDatabase

FEW, FEW_ROUNDS = 60, 3
MANY, MANY_ROUNDS = 1000, 4
ADAM = '[scatter.optimizer]\nname = "adam"'


def round_lines(devices: int) -> str:
    return f"quorum = 2\nwait_for_devices = {devices}\ndeadline_seconds = 200.0"


def factors(rng: np.random.Generator) -> bytes:
    """A scatter update of some rows, of as many columns as the device can afford, and of one user
    or two."""
    k = int(rng.integers(1, WIDTH + 1))
    rows = np.sort(rng.choice(ITEMS, size=rng.integers(1, 9), replace=False))
    height = int(rng.integers(1, 3))
    pulls, factor = rng.standard_normal((len(rows), height)), rng.standard_normal((height, WIDTH))
    tensors = users(rows, pulls, factor, k)
    return encode_scatter_update(Update(1, tensors), WIDTH, "int8", rng)


def made(body: Callable[[np.random.Generator], bytes], rounds: int, devices: int) -> Bodies:
    rng = np.random.default_rng(5)
    return [[body(rng) for _ in range(devices)] for _ in range(rounds)]


def scatter_home(
    folder: Path, devices: int, more: str = ADAM, url: str | None = None
) -> AggregatorHome:
    folder.mkdir()
    store = "" if url is None else f'[cluster]\nstore = "{url}"'
    return make_home(folder, BROKER, round_lines(devices), f"{more}\n{store}", store_url=url)


class Evaluating(Device):
    """One that says of each version that its error is the version's number and one."""

    record = RecordType.CONTRIBUTION

    def content(self, row: RoundRow, body: bytes) -> bytes:
        samples = 1 + self.number
        error = np.array([samples, samples * (row.version + 1.0)])
        said = write_evaluations(EvaluationReport((Evaluation("global", "mae", error),)))
        return with_report(encode(Report(ReportedOutcome.TRAINED, "", None, said)), body)


def evaluated_home(folder: Path, devices: int, url: str | None = None) -> AggregatorHome:
    home = fedavg_home(folder, devices, url)
    linear_artifact(folder / "linear", "mae")
    with home.task_file.open("a") as file:
        file.write("[evaluation]\nsample_cap = 0.0\n")
    return home


def fedavg_home(folder: Path, devices: int, url: str | None = None) -> AggregatorHome:
    store = "" if url is None else f'[cluster]\nstore = "{url}"'
    return averaging_home(folder, round_lines(devices), store, url)


METHODS = {
    "scatter": (
        factors,
        scatter_home,
        MANY_ROUNDS,
    ),
    # What is common to all methods was seen with the first.
    "fedavg": (averaged, fedavg_home, 2),
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["scatter", "fedavg"])
def test_thousands_of_updates(method: str, tmp_path: Path, make_database: MakeDatabase) -> None:
    body, make, rounds = METHODS[method]
    devices = [Device(number) for number in range(MANY)]
    bodies = made(body, rounds, MANY)
    found: dict[str, Played] = {}
    # Fewer updates over the other numbers of workers, on either store, are in the next test.
    for engine, workers in (("sqlite", 1), ("postgres", 8)):
        url = make_database() if engine == "postgres" else None
        home = make(tmp_path / f"{engine}-{workers}", MANY, url=url)
        found[f"{engine}, {workers} workers"] = play(home, workers, devices, bodies)
    assert len({*found.values()}) == 1, found
    (played,) = {*found.values()}
    assert len({*played.versions}) == rounds
    print(f"{MANY * rounds:,} updates, {method}, {', '.join(found)}: {played.model_file}")


@pytest.mark.parametrize("robust", ["none", "median"])
def test_workers_that_start_again_change_no_bit(
    tmp_path: Path, robust: str, make_database: MakeDatabase
) -> None:
    more = f'robust = "{robust}"\n{ADAM}'
    devices = [Device(number) for number in range(FEW)]
    bodies = made(factors, FEW_ROUNDS, FEW)
    found = {}
    for name, workers in (("one", 1), ("two", 2), ("eight", 8)):
        home = scatter_home(tmp_path / name, FEW, more)
        found[name] = play(home, workers, devices, bodies)
    home = scatter_home(tmp_path / "again", FEW, more)
    found["again"] = play(home, 2, devices, bodies, restarts=True)
    home = scatter_home(tmp_path / "postgres", FEW, more, make_database())
    found["postgres"] = play(home, 3, devices, bodies, restarts=True)
    assert len({*found.values()}) == 1, found


@pytest.mark.parametrize("robust", ["none", "median"])
def test_what_a_round_without_quorum_leaves_is_in_the_next(tmp_path: Path, robust: str) -> None:
    found = {}
    devices = [Device(number) for number in range(FEW)]
    bodies = made(factors, FEW_ROUNDS, FEW)
    for workers in (1, 2, 8):
        home = scatter_home(tmp_path / str(workers), FEW, f'robust = "{robust}"')
        found[workers] = play(home, workers, devices, bodies, alone=2)
    assert len({*found.values()}) == 1, found


def test_what_comes_late_counts_alike_over_any_workers(
    tmp_path: Path, make_database: MakeDatabase
) -> None:
    devices = [Evaluating(number) for number in range(FEW)]
    quick, slow = devices[: FEW // 2], devices[FEW // 2 :]
    bodies = made(averaged, 4, FEW)

    def played(home: AggregatorHome, workers: int, *, restarts: bool = False) -> tuple[str, ...]:
        text = home.task_file.read_text()
        lines = f'late = "staleness"\nwanted = {len(quick)}\nover_select = 100.0'
        home.task_file.write_text(text.replace("[round]", f"[round]\n{lines}"))
        found, rows = [], []
        rng = np.random.default_rng(workers)
        with closing(SealedRounds(home, devices, workers, rng)) as playing:
            for number, of_round in enumerate(bodies, 1):
                # The slow are one round behind, those of them with odd numbers two.
                late = [
                    (each, rows[-age], bodies[number - 1 - age][each.number])
                    for each in slow
                    if len(rows) >= (age := 1 + each.number % 2)
                ]
                closed = playing.round(number, quick, of_round, restarts=restarts, late=late)
                assert closed.summary.participants == len(quick) + len(late)
                rows.append(closed.row)
                found.append(playing.state())
            figures = playing.parts.tasks.first.store.evaluations.latest(9)
        # The slow of the last two rounds were not all heard yet.
        assert [each.version for each in figures] == [1, 0]
        for each in figures:
            (figure,) = each.figures
            assert (figure.devices, figure.samples) == (FEW, sum(range(1, FEW + 1)))
            assert figure.value == pytest.approx(each.version + 1)
        return (*found, str(figures))

    found = {
        f"{workers}": played(evaluated_home(tmp_path / str(workers), FEW), workers)
        for workers in (1, 2, 8)
    }
    found["again"] = played(evaluated_home(tmp_path / "again", FEW), 2, restarts=True)
    home = evaluated_home(tmp_path / "postgres", FEW, make_database())
    found["postgres"] = played(home, 3, restarts=True)
    assert len({*found.values()}) == 1, found


def test_what_a_store_refuses_for_a_moment_is_committed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = scatter_home(tmp_path / "fleet", FEW, "")
    devices = [Device(number) for number in range(FEW)]
    with closing(SealedRounds(home, devices, 1, np.random.default_rng(1))) as playing:
        (worker,), parts = playing.crew, playing.parts
        rounds = parts.tasks.first.rounds
        opened = rounds.tick()
        assert isinstance(opened, RoundOpened)
        worker.look()
        monkeypatch.setattr("aggregator.store.sqlite._BUSY_SECONDS", 0.05)
        (bodies,) = made(factors, 1, FEW)
        for device in devices:
            identity = UpdateIdentity(device.id, "default", opened.row.generation, 1)
            payload = write_update(identity, bodies[device.number])
            worker.registry.look_up([device.id])  # its handle, too
            assert worker.inbox.offer(device.id, payload) is None
            if device.number % 20 == 0:
                with parts.store.database.transaction(), pytest.raises(StoreAway):
                    worker.commit()
                worker.commit()
        worker.commit()
        closed = rounds.tick()
        assert isinstance(closed, RoundClosed) and closed.summary.participants == FEW
