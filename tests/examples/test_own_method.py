"""Somebody else's package adds a method: installed, found, and run with deaths over a broker."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.methods.method import Refused
from benchmarks.simulation import Simulation
from device_sdk import Trainer
from device_sdk.artifact import load_artifact
from device_sdk.artifact.flat_layout import layout_of
from device_sdk.device import Device
from device_sdk.local_data import LocalData
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.registry import LEARNERS, METHODS, method_names
from device_sdk.methods.state import RestoreError
from device_sdk.wire.arrays.exchange import Update
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.array_device import local_data
from tests.fakes.handmade import linear_artifact
from tests.fakes.killed_rounds import DEVICES, ROUNDS, final_state, make_home, run_with_deaths
from tests.fakes.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "examples" / "own_method"
TRAINING = {"keep": 0.4, "epochs": 2, "batch_size": 64, "learning_rate": 0.1}
SERVER = {"learning_rate": 0.1, "tau": 0.01}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has what this one has, and the package."""
    if importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("hatchling (it comes with the extra dev) or pip is not installed")
    folder = tmp_path_factory.mktemp("own")
    builder = venv.EnvBuilder(symlinks=True)
    builder.create(folder / "venv")
    found = Path(builder.ensure_directories(folder / "venv").env_exe)
    said = run(found, "import sysconfig; print(sysconfig.get_path('purelib'))")
    ours = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    Path(said.strip(), "ours.pth").write_text("\n".join(ours) + "\n")
    shutil.copytree(PACKAGE, folder / "source")  # a build leaves nothing in the checkout
    pip = [sys.executable, "-m", "pip", "--python", found, "--disable-pip-version-check"]
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "install", *options, folder / "source"], check=True, timeout=PATIENCE_SECONDS
    )
    return found


def run(python: Path, code: str) -> str:
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    return done.stdout


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The package's modules by name, not installed."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    return lambda name: importlib.import_module(f"sparse_yogi.{name}")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    linear_artifact(tmp_path / "linear")
    return tmp_path / "linear"


def make_method(own: Callable[[str], Any], artifact: Path) -> Any:
    """As the task file of :func:`test_killed_devices_and_a_killed_aggregator` makes it."""
    training = own("learner").SparseTraining(**TRAINING)
    settings = own("method").SparseYogiSettings(**SERVER, training=training)
    binding = own("method").SparseYogiBinding("sparse_yogi", settings)
    return binding.build(0, np.random.default_rng(0), [load_artifact(artifact)])


def make_learner(own: Callable[[str], Any], artifact: Path, place: int = 0) -> Any:
    learner = own("learner").SparseYogiLearner
    return learner(lambda: local_data(place), Trainer(artifact), "", np.random.default_rng(place))


def loss(artifact: Path, model: np.ndarray[Any, Any]) -> float:
    """Mean squared error of a model over all devices' samples."""
    trainer = Trainer(artifact)
    trainer.set_parameters(layout_of(trainer.artifact).unflatten(model))
    errors = []
    for place in range(DEVICES):
        samples = local_data(place).train
        said = trainer.predict({"x": samples["x"]})["prediction"]
        errors.append(np.square(said - samples["y"]).mean())
    return float(np.mean(errors))


def test_the_walk_through_quotes_a_package_of_sixty_lines() -> None:
    page = (ROOT / "docs" / "write-a-method.md").read_text()
    quoted = re.findall(r"```(?:python|toml)\n(.*?)```", page, re.DOTALL)
    task = quoted.pop()
    assert tomllib.loads(task)["task"]["method"] == "sparse_yogi"
    files = [path.read_text() for path in sorted(PACKAGE.glob("sparse_yogi/*.py"))]
    assert sum(map(_lines_of_code, files)) <= 60
    whole = "".join([(PACKAGE / "pyproject.toml").read_text(), *files])
    assert len(quoted) >= 3
    for block in quoted:
        assert block in whole, block


def _lines_of_code(text: str) -> int:
    """Imports among them; without blank lines, comments and docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    words = sum(len(_docstring_lines(node)) for node in nodes)
    return sum(bool(line.partition("#")[0].strip()) for line in text.splitlines()) - words


def _docstring_lines(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> list[str]:
    text = ast.get_docstring(node, clean=False)
    return [line for line in (text or "").splitlines() if line.strip()]


def test_an_installed_package_is_found_and_nothing_else_is_changed(python: Path) -> None:
    for group in (LEARNERS, METHODS):
        code = f"from device_sdk.methods.registry import *; print(*method_names({group!r}))"
        assert set(run(python, code).split()) == {*method_names(group), "sparse_yogi"}


def test_killed_devices_and_a_killed_aggregator_make_the_simulators_model(
    mosquitto: Mosquitto,
    tmp_path: Path,
    artifact: Path,
    python: Path,
    own: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", str(python))  # of every process that is started
    table = "\n".join(f"{name} = {value}" for name, value in SERVER.items())
    home = make_home(tmp_path, mosquitto.url, method="sparse_yogi", settings=TRAINING, table=table)
    homes, states = run_with_deaths(home, mosquitto.url, tmp_path, "measured")
    for status in states:
        assert (status.verdict, status.trained_round, status.version) == ("counted", ROUNDS, ROUNDS)
    method = make_method(own, artifact)
    before = loss(artifact, method.model)
    learners = [make_learner(own, artifact, place) for place in range(DEVICES)]
    simulation = Simulation(method, learners, np.random.default_rng(1))
    for _ in range(ROUNDS):
        assert simulation.round().participants == DEVICES
    # It counts each update once. A residual that a restart had lost would show here as well.
    model = final_state(home)["model"]
    np.testing.assert_allclose(model, method.model, rtol=1e-5, atol=1e-6)
    assert loss(artifact, model) < 0.7 * before
    # The rounds are over: every device predicts with what all made.
    trainer = Trainer(artifact)
    trainer.set_parameters(layout_of(trainer.artifact).unflatten(model))
    batch = {"x": local_data(0).train["x"]}
    expected = trainer.predict(batch)["prediction"]
    for folder in homes:
        with Device.open(folder, read_only=True) as device:
            said = device.predict(batch)["prediction"]
        np.testing.assert_allclose(said, expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_sent_is_sent_later(own: Callable[[str], Any], artifact: Path) -> None:
    method, learner = make_method(own, artifact), make_learner(own, artifact)
    first = learner.train(method.open_round(1))
    assert len(first.tensors["places"]) == 6 and first.tensors["places"].dtype == np.int32
    left = learner.state()["left"]
    assert np.count_nonzero(left) == 9 and not left[first.tensors["places"]].any()
    assert np.abs(left).max() <= np.abs(first.tensors["values"]).min()
    learner.receipt(1, counted=True)
    assert not learner.state()["sent"].any()
    # The same round again: what training finds, and what was left.
    again = learner.train(method.open_round(2))
    once = np.zeros(15, np.float32)
    once[first.tensors["places"]] = first.tensors["values"]
    told = np.zeros(15, np.float32)
    told[again.tensors["places"]] = again.tensors["values"]
    whole = once + left
    np.testing.assert_allclose(told + learner.state()["left"], whole + left, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("heard", [True, False], ids=["refused", "without a verdict"])
def test_what_did_not_count_is_sent_again(
    own: Callable[[str], Any], artifact: Path, heard: bool
) -> None:
    method, learner = make_method(own, artifact), make_learner(own, artifact)
    learner.train(method.open_round(1))
    whole = learner.state()["left"] + learner.state()["sent"]
    other = make_learner(own, artifact)
    other.restore(learner.state())  # a device makes its learner anew for each round
    if heard:
        other.receipt(1, counted=False)
        other.receipt(1, counted=False)  # told twice, added once
    other.train(method.open_round(2))
    state = other.state()
    np.testing.assert_allclose(state["left"] + state["sent"], 2 * whole, rtol=1e-4, atol=1e-6)


def test_a_learner_refuses_what_does_not_fit(own: Callable[[str], Any], artifact: Path) -> None:
    method, learner = make_method(own, artifact), make_learner(own, artifact)
    broadcast = method.open_round(1)
    before = learner.state()
    for bad in (
        replace(broadcast, tensors={"model": np.zeros(3, np.float32)}),
        replace(broadcast, settings={}),
    ):
        with pytest.raises(LearnerError):
            learner.train(bad)
    for state in ({}, {**before, "left": np.zeros(3, np.float32)}):
        with pytest.raises(LearnerError, match="expected"):
            learner.restore(state)
    empty = {name: array[:0] for name, array in local_data(0).train.items()}
    poor = own("learner").SparseYogiLearner(
        lambda: LocalData(empty), Trainer(artifact), "", np.random.default_rng(0)
    )
    with pytest.raises(LearnerError, match="no local samples"):
        poor.train(broadcast)
    for name, array in learner.state().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_state_in_the_middle_of_a_round_goes_on_bit_for_bit(
    own: Callable[[str], Any], artifact: Path
) -> None:
    method, other = make_method(own, artifact), make_method(own, artifact)
    learners = [make_learner(own, artifact, place) for place in range(2)]
    for round_id in (1, 2):
        broadcast = method.open_round(round_id)
        updates = [learner.train(broadcast) for learner in learners]
        method.absorb(updates[0])
        other.restore(method.state())
        for each in (method, other):
            each.check(updates[1])
            each.absorb(updates[1])
        assert method.close_round() == other.close_round()
        for name, array in method.state().items():
            np.testing.assert_array_equal(other.state()[name], array)
    with pytest.raises(RestoreError, match="'model' is float32"):
        other.restore({**method.state(), "model": np.zeros(3, np.float32)})


def test_a_round_without_updates_keeps_the_version(
    own: Callable[[str], Any], artifact: Path
) -> None:
    method = make_method(own, artifact)
    method.open_round(1)
    assert (method.close_round().version, method.close_round().participants) == (0, 0)


@pytest.mark.parametrize(
    ("places", "values", "reason"),
    [
        ([0, 1], [1.0], "bad-values"),
        ([1, 1], [1.0, 1.0], "bad-places"),
        ([-1, 1], [1.0, 1.0], "bad-places"),
        ([1, 15], [1.0, 1.0], "bad-places"),
        ([], [], "bad-places"),
        (list(range(16)), [1.0] * 16, "bad-places"),
        ([0, 1], [1.0, np.inf], "bad-values"),
    ],
)
def test_check_refuses_what_could_not_be_added(
    own: Callable[[str], Any],
    artifact: Path,
    places: list[int],
    values: list[float],
    reason: str,
) -> None:
    method = make_method(own, artifact)
    method.open_round(1)
    tensors = {"places": np.asarray(places, np.int32), "values": np.asarray(values, np.float32)}
    for update in (Update(1, tensors), Update(2, tensors), Update(1, {})):
        with pytest.raises(Refused) as refused:
            method.check(update)
        if update.round_id == 1 and update.tensors:
            assert refused.value.reason == reason
