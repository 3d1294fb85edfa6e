"""Large state is written where it lies: the same bits as with two banks, whatever happens."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import export
import export.build
from device_sdk import Trainer
from device_sdk.artifact import ArtifactError, Manifest, load_artifact
from device_sdk.errors import GraphRunError, NonFiniteStep, StateError
from device_sdk.runtime.session import SessionSettings
from export.in_place import Large, gated
from tests.fakes.handmade.writing import write_artifact

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]
ROWS, WIDTH, INPUTS = 1100, 64, 280


@pytest.fixture(autouse=True, scope="module")
def _small_is_large() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export.build, "LEAST_STATE_BYTES", 0)
        patch.setattr(export.build, "LEAST_TENSOR_BYTES", 0)
        yield


class Dense(nn.Module):
    """One large matrix, and small parameters that are packed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(INPUTS, INPUTS)
        self.out = nn.Linear(INPUTS, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.tanh(self.wide(x)))
        return found


def _squares(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def _example() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, INPUTS), "y": torch.randn(8, 3)}


def _exported(
    folder: Path, optimizer: Any, loss: Any = _squares, *, verify: bool = True
) -> Manifest:
    return export.train_step(
        Dense(),
        loss,
        _example(),
        optimizer=optimizer,
        dynamic={"x": {0: "batch"}, "y": {0: "batch"}},
        directory=folder,
        verify=verify and loss is _squares,
    ).manifest


def _in_two_banks(write: Callable[[Path], object], to: Path) -> Path:
    """What the exporter writes where nothing is large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export.build, "LEAST_STATE_BYTES", 1 << 40)
        write(to)
    assert not any(each.in_place for each in load_artifact(to).manifest.state)
    return to


@pytest.fixture(scope="module")
def adam(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that no test changes."""
    folder = tmp_path_factory.mktemp("in-place") / "adam"
    _exported(folder, export.Adam(1e-2))
    return folder


@pytest.fixture(scope="module")
def adam_in_two_banks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model and optimizer where nothing is large."""
    folder = tmp_path_factory.mktemp("two-banks") / "adam"
    return _in_two_banks(lambda to: _exported(to, export.Adam(1e-2), verify=False), folder)


def _in_place(manifest: Manifest) -> set[str]:
    return {each.name for each in manifest.state if each.in_place}


def _batch(step: int) -> Batch:
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(6, INPUTS)), rng.normal(size=(6, 3))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def _spoilt(step: int) -> Batch:
    """Every sixth batch is bad, or merely huge."""
    batch = _batch(step)
    if step % 6 == 5:
        scale = [np.nan, 1e12, np.inf, 1e19, 1e25, 1e38][step // 6 % 6]
        batch["y"] = (batch["y"] * np.float32(scale)).astype(np.float32)
    return batch


def _bits(trainer: Trainer) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in trainer.state.items()}


def _outcome(trainer: Trainer, batch: Batch, **more: Any) -> float | str:
    try:
        return trainer.step(batch, **more)
    except NonFiniteStep:
        return "not finite"


W, B = "wide.weight", "packed"
OPTIMIZERS: list[tuple[str, Callable[[], Any], set[str]]] = [
    (
        "adamw",
        lambda: export.AdamW(1e-2, amsgrad=True),
        {W, *(f"adamw.{kind}.{W}" for kind in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))},
    ),
    (
        "nesterov",
        lambda: export.Sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        {W, f"sgd.momentum_buffer.{W}"},
    ),
    (
        "rmsprop",
        lambda: export.RMSprop(1e-3, centered=True, momentum=0.5),
        {W, *(f"rmsprop.{kind}.{W}" for kind in ("square_avg", "grad_avg", "momentum_buffer"))},
    ),
    # The parameter's step reads the moment that the new one replaces.
    ("lion", lambda: export.Lion(1e-3), {W}),
    (
        "accumulated",
        lambda: export.Accumulated(export.Adam(1e-2), every=2),
        {W, *(f"adam.{kind}.{W}" for kind in ("accumulated", "exp_avg", "exp_avg_sq"))},
    ),
    # The average moves by how far the parameter does.
    (
        "averaged",
        lambda: export.Averaged(export.Clipped(export.AdamW(1e-2), norm=1.0), decay=0.9),
        {f"adamw.{kind}.{W}" for kind in ("average_lag", "exp_avg", "exp_avg_sq")},
    ),
    # Norms of whole tensors: the update is needed before it is written.
    ("lamb", lambda: export.Lamb(1e-2), set()),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("make", "expected"), [each[1:] for each in OPTIMIZERS], ids=[each[0] for each in OPTIMIZERS]
)
def test_the_same_bits_as_with_two_banks(
    tmp_path: Path, make: Callable[[], Any], expected: set[str]
) -> None:
    manifest = _exported(tmp_path / "one", make())
    assert _in_place(manifest) == expected
    two = _in_two_banks(lambda to: _exported(to, make(), verify=False), tmp_path / "two")
    outcomes = []
    for threads in (1, 2):
        one, other = (Trainer(f, providers="cpu", threads=threads) for f in (tmp_path / "one", two))
        for step in range(36):
            before = _bits(one)
            if step % 6 == 5:
                ordinary = one.state
            outcomes.append(_outcome(one, _spoilt(step)))
            assert outcomes[-1] == _outcome(other, _spoilt(step))
            assert _bits(one) == _bits(other)
            if outcomes[-1] == "not finite":
                assert _bits(one) == before
            assert one.step_count == other.step_count
            if step % 6 == 1 and step > 6:
                # Two steps on from a huge batch; what it made of the state is of no more use.
                for trainer in (one, other):
                    trainer.set_state(ordinary)
    assert 0 < outcomes.count("not finite") < len(outcomes) / 2


def test_a_parameter_alone_may_overflow(tmp_path: Path) -> None:
    def write(to: Path) -> Manifest:
        return _exported(to, export.Sgd(0.1, momentum=0.9), verify=False)

    write(tmp_path / "one")
    two = _in_two_banks(write, tmp_path / "two")
    one, other = Trainer(tmp_path / "one"), Trainer(two)
    rates = (0.1, 3e38, 1e37, 1e30, -3e38, 0.1)
    found = []
    for step, rate in enumerate(rates):
        found.append([_outcome(each, _batch(step), hyper={"lr": rate}) for each in (one, other)])
        assert _bits(one) == _bits(other)
    assert all(a == b for a, b in found)
    assert "not finite" in (a for a, _ in found)


def test_state_that_is_set_is_measured(adam: Path, adam_in_two_banks: Path) -> None:
    assert _in_place(load_artifact(adam).manifest) == {
        W,
        f"adam.exp_avg.{W}",
        f"adam.exp_avg_sq.{W}",
    }
    one, other = Trainer(adam), Trainer(adam_in_two_banks)
    shape = one.state[W].shape
    for step, (name, value) in enumerate(
        [
            (W, 1e37), (W, 1.0), (f"adam.exp_avg_sq.{W}", -1.0), (f"adam.exp_avg_sq.{W}", 1e38),
            (f"adam.exp_avg.{W}", 3e38), (W, np.nan), (W, 0.5), (f"adam.exp_avg.{W}", 0.0),
            (f"adam.exp_avg_sq.{W}", 0.0),
        ]
    ):  # fmt: skip
        for trainer in (one, other):
            trainer.set_state({name: np.full(shape, value, np.float32)})
        for again in range(2):
            batch = _batch(2 * step + again)
            assert _outcome(one, batch) == _outcome(other, batch)
            assert _bits(one) == _bits(other)
    assert one.step_count >= 4


def test_checkpoints_and_resets(adam: Path, tmp_path: Path) -> None:
    trainer = Trainer(adam)
    losses = [trainer.step(_batch(step)) for step in range(3)]
    trainer.save(tmp_path / "checkpoint")
    further = [trainer.step(_batch(step)) for step in range(3, 6)]
    final = _bits(trainer)
    trainer.restore(tmp_path / "checkpoint")
    assert [trainer.step(_batch(step)) for step in range(3, 6)] == further
    assert _bits(trainer) == final
    trainer.reset()
    assert trainer.outputs == {}
    assert [trainer.step(_batch(step)) for step in range(3)] == losses


class Rows(nn.Module):
    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.items = nn.Embedding(rows, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.items(x).sum(1)


def _rows(folder: Path) -> None:
    export.train_step(
        Rows(),
        lambda model, batch: (model(batch["x"]) ** 2).mean(),
        {"x": torch.randint(0, ROWS, (8,))},
        optimizer=export.Adam(1e-2),
        dynamic={"x": {0: "batch"}, "items.weight": {0: "items"}},
        directory=folder,
        verify=False,
    )


def test_axes_of_the_state_change(tmp_path: Path) -> None:
    _rows(tmp_path / "one")
    assert len(_in_place(load_artifact(tmp_path / "one").manifest)) == 3
    two = _in_two_banks(_rows, tmp_path / "two")
    one, other = Trainer(tmp_path / "one"), Trainer(two)
    rng = np.random.default_rng(3)
    for rows in (ROWS, 2 * ROWS, 7, ROWS):
        table = rng.normal(size=(rows, WIDTH)).astype(np.float32)
        for trainer in (one, other):
            trainer.set_parameters({"items.weight": table})
        for _ in range(3):
            batch = {"x": rng.integers(0, rows, 5)}
            assert one.step(batch) == other.step(batch)
            assert _bits(one) == _bits(other)
    # onnxruntime refuses what torch does: before anything is written.
    before = _bits(one)
    for wrong in (ROWS, -1):
        with pytest.raises((GraphRunError, NonFiniteStep)):
            one.step({"x": np.array([0, wrong])})
        assert (_bits(one), one.step_count) == (before, 12)


# What reads an old value late keeps two banks.


def _told(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    weight = model.wide.weight
    return _squares(model, batch), {"row": weight.reshape(-1)[:4] * 1.0, "whole": weight}


def _pulled(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    """The gradient of the weights is the weights."""
    return 0.5 * (model.wide.weight**2).sum() + 0.0 * _squares(model, batch)


def _pure_pull(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    return (model.wide.weight * model.wide.weight.detach()).sum() + model.out(batch["x"]).mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", [_told, _pulled, _pure_pull])
def test_late_readers_keep_two_banks(tmp_path: Path, loss: Any) -> None:
    def write(to: Path) -> Manifest:
        return _exported(to, export.Adam(1e-2), loss)

    manifest = write(tmp_path / "one")
    assert (W in _in_place(manifest)) is (loss is not _pure_pull)
    two = _in_two_banks(write, tmp_path / "two")
    one, other = Trainer(tmp_path / "one"), Trainer(two)
    for step in range(5):
        assert one.step(_batch(step)) == other.step(_batch(step))
        assert _bits(one) == _bits(other)
        for name, array in one.outputs.items():
            assert array.tobytes() == other.outputs[name].tobytes()


def _chain(*nodes: tuple[str, list[str], str]) -> onnx.ModelProto:
    """A step by hand: loss and guard, and these nodes on the state ``a`` and its gradient."""
    make, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    shape = (4, 4)
    graph = onnx.helper.make_graph(
        [
            make("MatMul", ["state.a", "batch.x"], ["gradient.a"]),
            make("ReduceSum", ["gradient.a"], ["loss"], keepdims=0),
            *(make(operator, read, [written]) for operator, read, written in nodes),
            make("ReduceSum", ["new.a"], ["guard"], keepdims=0),
        ],
        "step",
        [info(name, onnx.TensorProto.FLOAT, shape) for name in ("state.a", "state.b", "batch.x")],
        [
            *(info(name, onnx.TensorProto.FLOAT, ()) for name in ("loss", "guard")),
            *(info(n, onnx.TensorProto.FLOAT, shape) for n in ("new.a", "new.b", "gradient.a")),
        ],
        [
            onnx.numpy_helper.from_array(np.array(value, np.float32), name)
            for name, value in (("one", 1.0), ("tenth", 0.1))
        ],
    )
    opset = onnx.helper.make_opsetid("", 20)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (
            [
                ("Add", ["state.b", "gradient.a"], "new.b"),
                ("Sub", ["state.a", "new.b"], "new.a"),
            ],
            {"a", "b"},
        ),
        # b is read by what makes the new a, which need not come before the new b.
        (
            [
                ("Add", ["state.b", "gradient.a"], "new.b"),
                ("Sub", ["state.a", "state.b"], "new.a"),
            ],
            {"a"},
        ),
        # The same behind a node that onnxruntime leaves out.
        (
            [
                ("Mul", ["state.b", "one"], "same"),
                ("Add", ["same", "gradient.a"], "new.b"),
                ("Sub", ["state.a", "same"], "new.a"),
            ],
            {"a"},
        ),
        # Not element by element.
        (
            [
                ("Add", ["state.b", "gradient.a"], "new.b"),
                ("MatMul", ["state.a", "gradient.a"], "new.a"),
            ],
            {"b"},
        ),
    ],
)
def test_what_comes_before_what(
    nodes: list[tuple[str, list[str], str]], expected: set[str]
) -> None:
    found = gated(_chain(*nodes), [Large("a", "parameter"), Large("b", "m")], {})
    assert set(found.in_place) == expected


# Signals and failures.


def _digest(trainer: Trainer) -> str:
    found = hashlib.sha256()
    for name, array in sorted(trainer.state.items()):
        found.update(name.encode() + array.tobytes())
    return found.hexdigest()


class Naming(Dense):
    """Looks up names, and keeps count of what it was given, beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("names", torch.arange(20))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def _named(model: Any, batch: Mapping[str, torch.Tensor]) -> Any:
    return _squares(model, batch), {"name": model.names[batch["i"]] * 2}


def _counted(model: Any, batch: Mapping[str, torch.Tensor]) -> Any:
    model.seen.add_(model.names[batch["i"]].sum())
    return _squares(model, batch)


@pytest.mark.parametrize("loss", [_named, _counted])
def test_what_fails_beside_the_update_drops_the_step(tmp_path: Path, loss: Any) -> None:
    """Nothing is written before all that the step gives is there."""
    manifest = export.train_step(
        Naming(),
        loss,
        {**_example(), "i": torch.arange(8)},
        optimizer=export.Adam(1e-2),
        dynamic={name: {0: "batch"} for name in ("x", "y", "i")},
        directory=tmp_path / "artifact",
        verify=False,
    ).manifest
    assert _in_place(manifest)
    trainer = Trainer(tmp_path / "artifact")
    for step in range(3):
        trainer.step({**_batch(step), "i": np.arange(6)})
    before = _bits(trainer), _output_bytes(trainer)
    for _ in range(2):
        with pytest.raises(GraphRunError, match="dropped"):
            trainer.step({**_batch(3), "i": np.full(6, 50)})
        assert (_bits(trainer), _output_bytes(trainer)) == before
    assert trainer.step_count == 3
    trainer.step({**_batch(3), "i": np.arange(6)})


def test_a_gradient_that_is_the_state_itself(tmp_path: Path) -> None:
    """Nothing of the update reads a gradient then."""
    manifest = _exported(tmp_path / "artifact", export.Sgd(1e-2), _pure_pull)
    assert W not in _in_place(manifest)
    trainer = Trainer(tmp_path / "artifact")
    weight = trainer.parameters["wide.weight"]
    trainer.step(_batch(0))
    np.testing.assert_allclose(trainer.parameters["wide.weight"], weight * 0.99, rtol=1e-6)


def _output_bytes(trainer: Trainer) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in trainer.outputs.items()}


def _told_of_unknown_length(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    y = model(batch["x"])
    return _squares(model, batch), {"y": y, "above": y[batch["y"] > 0]}


def _interrupting(number: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises KeyboardInterrupt at this line of a step, counted from 0."""
    lines = iter(range(10**6))

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if "device_sdk" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(lines) == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("two_banks", [False, True])
def test_an_interrupt_at_any_line_leaves_a_whole_step(tmp_path: Path, two_banks: bool) -> None:
    def write(to: Path) -> Manifest:
        return _exported(to, export.Adam(1e-2), _told_of_unknown_length)

    folder = tmp_path / "artifact"
    _in_two_banks(write, folder) if two_banks else write(folder)
    steady, trainer = Trainer(folder), Trainer(folder)
    whole = [(_digest(steady), _output_bytes(steady))]
    kept, dropped, line = 0, 0, 0
    traced = sys.gettrace()
    while True:
        count = trainer.step_count
        sys.settrace(_interrupting(line))
        try:
            trainer.step(_batch(count))
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(traced)
        line += 1
        kept, dropped = (kept + 1, dropped) if trainer.step_count > count else (kept, dropped + 1)
        while len(whole) <= trainer.step_count:
            steady.step(_batch(len(whole) - 1))
            whole.append((_digest(steady), _output_bytes(steady)))
        told = _output_bytes(trainer)
        assert (_digest(trainer), told) == whole[trainer.step_count]
        # Outputs are still the last step's after one that is dropped.
        with pytest.raises(NonFiniteStep):
            trainer.step({name: array * np.float32(np.nan) for name, array in _batch(0).items()})
    assert dropped > 20
    assert kept > 0 or two_banks


_STORM = """
import os, signal, sys, threading, time
import numpy as np
from device_sdk import Trainer

def _bits(trainer):
    return [(name, array.tobytes()) for name, array in sorted(trainer.state.items())]

def _batch(step):
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(6, n)).astype(np.float32) for name, n in (("x", 280), ("y", 3))}

armed = False
def handler(number, frame):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)
steady, trainer = Trainer(sys.argv[1]), Trainer(sys.argv[1])
over, rng = threading.Event(), np.random.default_rng(0)
def storm():
    while not over.is_set():
        time.sleep(rng.uniform(0, 0.001))
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=storm).start()
interrupts, whole = 0, {0: _bits(steady)}
while trainer.step_count < 200:
    count = trainer.step_count
    try:
        armed = True
        trainer.step(_batch(count))
        armed = False
    except KeyboardInterrupt:
        interrupts += 1
    armed = False
    while steady.step_count < trainer.step_count:
        steady.step(_batch(steady.step_count))
    assert count <= trainer.step_count <= count + 1
    assert _bits(trainer) == _bits(steady), (count, trainer.step_count)
over.set()
print(interrupts)
"""


def test_a_storm_of_signals(adam: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _STORM, str(adam)],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


class _Failing:
    """A session that fails after it has begun to write, or before."""

    def __init__(self, trainer: Trainer, *, begun: bool) -> None:
        assert trainer._runner is not None
        self._real = trainer._runner._session
        self._gate = trainer._banks.gate
        self._begun = begun
        self._trainer, self._before = trainer, trainer.parameters

    def run_with_iobinding(self, binding: ort.IOBinding, options: ort.RunOptions) -> None:
        if self._begun:
            assert self._gate is not None
            self._real.run_with_iobinding(binding, options)
            assert self._gate.begun.array and self._gate.done.array
            self._gate.done.array[...] = False
            # What another thread is told meanwhile.
            for use in (
                lambda: self._trainer.parameters,
                lambda: self._trainer.set_parameters(self._before),
            ):
                with pytest.raises(StateError, match="a step is being run, by another thread"):
                    use()
        raise RuntimeError("out of memory")


@pytest.fixture
def failing(
    adam: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Trainer]]:
    def make(*, begun: bool) -> Trainer:
        trainer = Trainer(adam)
        for step in range(3):
            trainer.step(_batch(step))
        trainer.save(tmp_path / "checkpoint")
        with monkeypatch.context() as patch:
            patch.setattr(trainer._runner, "_session", _Failing(trainer, begun=begun))
            told = "left the state torn" if begun else "was dropped"
            with pytest.raises(GraphRunError, match=f"{told}: out of memory"):
                trainer.step(_batch(3))
        return trainer

    return make


def test_a_failure_before_the_gate_changes_nothing(failing: Callable[..., Trainer]) -> None:
    trainer = failing(begun=False)
    before = _digest(trainer)
    trainer.step(_batch(3))
    other = failing(begun=False)
    assert _digest(other) == before


def test_a_failure_behind_the_gate_is_not_passed_over(
    failing: Callable[..., Trainer], adam: Path, tmp_path: Path
) -> None:
    trainer = failing(begun=True)
    old = trainer.step_count
    for use in (
        lambda: trainer.step(_batch(3)),
        lambda: trainer.predict(_batch(3)),
        lambda: trainer.parameters,
        lambda: trainer.state,
        lambda: trainer.save(tmp_path / "torn"),
        lambda: trainer.set_parameters({"wide.weight": np.zeros((INPUTS, INPUTS), np.float32)}),
    ):
        with pytest.raises(
            StateError, match=r"restore a checkpoint, set the whole state, or reset"
        ):
            use()
    assert trainer.step_count == old == 3
    assert not (tmp_path / "torn").exists()
    trainer.restore(tmp_path / "checkpoint")
    steady = Trainer(adam)
    for step in range(5):
        if step >= 3:
            trainer.step(_batch(step))
        steady.step(_batch(step))
    assert _digest(trainer) == _digest(steady)
    again = failing(begun=True)
    again.reset()
    assert again.step_count == 0


def test_an_artifact_whose_state_in_place_has_no_gate_is_refused(
    adam: Path, tmp_path: Path
) -> None:
    manifest = load_artifact(adam).manifest
    files = {name: (adam / name).read_bytes() for name in manifest.files}
    model = onnx.load_from_string(files["train.onnx"])
    gate = next(node for node in model.graph.node if "new.wide.weight" in node.output)
    gate.input[0] = "other"
    model.graph.node.insert(0, onnx.helper.make_node("Identity", ["begun"], ["other"]))
    changed = {**files, "train.onnx": model.SerializeToString()}
    with pytest.raises(ArtifactError, match="not written by one If behind 'begun'"):
        write_artifact(tmp_path / "other", manifest, changed)
        load_artifact(tmp_path / "other")


def test_small_models_are_as_before(adam_in_two_banks: Path) -> None:
    nodes = onnx.load(adam_in_two_banks / "train.onnx").graph.node
    assert "If" not in {node.op_type for node in nodes}
    assert not load_artifact(adam_in_two_banks).manifest.graphs["train"].is_gated


def test_an_accelerator_keeps_two_banks(adam: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Trainer(adam, providers="cpu")
    monkeypatch.setattr(SessionSettings, "host_only", False)
    other = Trainer(adam, providers="cpu")
    for step in range(12):
        assert _outcome(one, _spoilt(step)) == _outcome(other, _spoilt(step))
        assert _bits(one) == _bits(other)
    first, second = (other._banks.value(bank, W).numpy() for bank in (0, 1))
    assert not np.shares_memory(first, second)
    assert not np.array_equal(first, second)
