"""One device sends any value that is not refused: nobody stops, and training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from aggregator.methods.fedavg import FedAvgBinding, FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Binding
from aggregator.methods.scatter import ScatterBinding, ScatterTable
from aggregator.methods.server_optimizer import OptimizerSettings
from aggregator.publish.publisher import Publisher
from device_sdk.artifact import Artifact
from device_sdk.methods.scatter.contract import LossName, encode_scatter_update
from device_sdk.wire.arrays.exchange import Broadcast, Update, encode_update
from device_sdk.wire.arrays.tensors import Codec
from tests.attacks.conftest import MakeStage
from tests.attacks.stage import Stage
from tests.fakes.scatter_updates import ONE_WIDTH, one_user
from tests.faults.known import ITEMS, WIDTH

_ROUND = "quorum = 1\nwait_for_devices = 4\ndeadline_seconds = 60\npause_seconds = 5"
_VALUES = [1e3, 1e6, 1e11, 1e12, -1e12]
_PLAIN = OptimizerSettings(name="plain", learning_rate=1.0)


def _scatter_body(place: int, number: int, value: float | None, usual: float = 0.01) -> bytes:
    rng = np.random.default_rng([place, number])
    rows = np.arange(0, ITEMS, 1 if value else 2)
    pulls, vector = usual * rng.standard_normal(len(rows)), rng.standard_normal(WIDTH)
    if value is not None:
        pulls, vector = np.full_like(pulls, value), np.ones(WIDTH)
    tensors = one_user(WIDTH, rows, pulls, vector)
    return encode_scatter_update(Update(number, tensors), WIDTH, "float32")


def _bpr_body(place: int, number: int, value: float | None, usual: float) -> bytes:
    rng = np.random.default_rng([place, number])
    rows = np.arange(0, ITEMS, 1 if value else 2)
    values = usual * rng.standard_normal((len(rows), WIDTH))
    if value is not None:
        values = np.full_like(values, value)
    tensors = {"rows": rows, "columns": np.arange(WIDTH), "values": values.astype(np.float32)}
    return encode_scatter_update(Update(number, tensors), WIDTH, "float32")


def _scatter(loss: LossName = "least-squares", *, limited: bool = True) -> Binding:
    settings = ScatterTable(loss, ONE_WIDTH, optimizer=_PLAIN, columns=WIDTH, spread=0.1)
    if not limited:
        settings = replace(settings, clip_multiple=0.0, row_multiple=0.0)
    return ScatterBinding("scatter", settings)


class _SmallModel(FedAvgBinding):
    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> FedAvgMethod:
        first = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
        buffers = {"norm.running_var": np.ones(4, np.float32)}
        return FedAvgMethod({"w": first}, buffers, self.settings)


def _averaging() -> Binding:
    return _SmallModel("fedavg", FedAvgSettings())


def _averaging_body(place: int, number: int, value: float | None) -> bytes:
    rng = np.random.default_rng([place, number])
    shapes = {"w.w": (8, 4), "b.norm.running_var": (4,)}
    tensors = {name: 0.01 * rng.standard_normal(shape) for name, shape in shapes.items()}
    if value is not None:
        tensors = {name: np.full_like(array, value) for name, array in tensors.items()}
    said = {"samples": 40 if value is None else 1 << 40, "loss": 0.1 if value is None else 1e12}
    floats = {name: array.astype(np.float32) for name, array in tensors.items()}
    return encode_update(Update(number, floats, said), Codec.FLOAT32)


def _published(stage: Stage) -> np.ndarray:
    state = stage.parts.first.aggregation.state()
    found: np.ndarray = state["items"] if "items" in state else state["model"]
    return found


@pytest.mark.parametrize("value", _VALUES)
@pytest.mark.parametrize("method", ["scatter", "fedavg"])
def test_one_device_of_any_value_stops_no_round_under_the_defaults(
    make_stage: MakeStage, method: str, value: float
) -> None:
    make_body = _scatter_body if method == "scatter" else _averaging_body

    def body(place: int, generation: int, number: int) -> bytes:
        # The hostile one is there from the first round on, and in every round.
        return make_body(place, number, value if place == 0 else None)

    stage = make_stage(
        judged=False,
        devices=4,
        round_lines=_ROUND,
        body=body,
        binding=_scatter() if method == "scatter" else _averaging(),
        codec="float16",
    )
    before = _published(stage)
    stage.await_version(3)
    stage.restart_aggregator()
    stage.await_version(8)
    stage.run(1.0)
    assert [stage.verdict(place, 7) for place in range(4)] == ["counted"] * 4
    # An honest update of scatter has a norm of about 0.5, of averaging 0.06; eight rounds of one in
    # four with four times that.
    honest = 0.5 if method == "scatter" else 0.08
    assert float(np.linalg.norm(_published(stage) - before)) < 8 * (4 + 3) / 4 * honest


_USUAL = 2.5e7


def _held_body(place: int, generation: int, number: int) -> bytes:
    """In round 2 all send what a task without limits still takes, and no codec holds the sum of."""
    return _bpr_body(place, number, 1e12 if number == 2 else None, _USUAL)


def test_a_version_that_could_not_be_published_is_not_made_and_its_round_is_held(
    make_stage: MakeStage,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = make_stage(
        judged=False,
        devices=4,
        round_lines=_ROUND,
        body=_held_body,
        binding=_scatter("bpr", limited=False),
        codec="float16",
    )
    stage.await_version(1)
    stage.run(30.0)
    for _ in range(2):
        current = stage.parts.first.rounds.current
        assert current is not None and current.round == 2
        assert current.held is not None and "exceeds 1e12" in current.held
        assert stage.version == 1 and np.abs(_published(stage)).max() < 20 * _USUAL
        capsys.readouterr()
        assert stage.command("status") == 0
        assert "round 2 is held" in capsys.readouterr().out
        stage.kill_aggregator()
        caplog.clear()
        stage.start_aggregator()
        assert "round 2 is held" in caplog.text, "a start says so, and not that it goes on"
        stage.run(30.0)
    # The way out: limits, and the same updates once more.
    stage.kill_aggregator()
    stage.binding = _scatter("bpr")
    stage.start_aggregator()
    assert stage.command("release") == 0
    stage.await_version(4)
    assert np.abs(_published(stage)).max() < 20 * _USUAL
    assert [stage.verdict(place, 2) for place in range(4)] == ["counted"] * 4


def test_what_is_committed_and_cannot_be_published_holds_the_next_round(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(
        judged=False,
        devices=4,
        round_lines=_ROUND,
        body=_held_body,
        binding=_scatter("bpr", limited=False),
        codec="float16",
    )
    with monkeypatch.context() as patched:
        # As an aggregator did that asked only when it was too late.
        patched.setattr(Publisher, "require_publishable", lambda self, broadcast: None)
        stage.restart_aggregator()
        stage.await_version(2)
        stage.run(30.0)
    for _ in range(2):
        assert stage.parts.first.rounds.current is None
        assert "exceeds 1e12" in (stage.service.snapshot().tasks[0].unpublished or "")
        capsys.readouterr()
        assert stage.command("status") == 0
        assert "round 3 is held: it could not be published" in capsys.readouterr().out
        stage.restart_aggregator()
        stage.run(30.0)
    assert stage.command("release") == 0
    stage.run(5.0)
    assert stage.parts.first.rounds.unpublished is not None, (
        "released, and held for the same reason"
    )
    assert stage.command("rollback", "--to", "1") == 0
    assert stage.command("release") == 0
    stage.await_version(4)
    assert stage.command("release") != 0, "nothing is held any more"


def test_keys_are_renewed_and_rotated_while_a_round_is_held(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage()
    stage.await_version(1)
    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "seal_round", _cannot)
        stage.restart_aggregator()
        stage.run_until(lambda: stage.parts.first.rounds.unpublished is not None)
    group = stage.store.secrets.group_keys()[-1].epoch
    for what in ("group", "keys", "root"):
        assert stage.command("rotate", what) == 0
        stage.run(10.0)
    stage.offset_seconds = 25 * 86_400.0  # the descriptor is renewed, too
    stage.run(10.0)
    stage.restart_aggregator()
    stage.run(10.0)
    version = stage.version
    assert stage.parts.first.rounds.current is None
    assert stage.command("release") == 0
    stage.await_version(version + 2)
    assert stage.store.secrets.group_keys()[-1].epoch > group
    stage.run(30.0)


def _cannot(*arguments: object) -> None:
    raise ValueError("as the test wants")


def test_whatever_stops_a_publication_holds_its_round(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(round_lines=_ROUND, devices=4)
    stage.await_version(1)

    def refuse(self: Publisher, row: object, broadcast: Broadcast) -> None:
        raise RuntimeError("no seal")

    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "seal_round", refuse)
        stage.restart_aggregator()
        stage.run_until(lambda: stage.parts.first.rounds.unpublished is not None)
        version = stage.version
        stage.run(120.0)
        assert "no seal" in (stage.parts.store.first.facts.unpublished or "")
    stage.restart_aggregator()
    stage.run(30.0)
    assert stage.parts.first.rounds.unpublished is not None
    assert stage.command("release") == 0
    stage.await_version(version + 2)
