"""Checkpoints: bit-exact continuation, damage noticed, and never a torn file."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk import CheckpointError, Trainer
from device_sdk.artifact.safetensors import Array, decode
from device_sdk.runtime.state import (
    Checkpoint,
    decode_checkpoint,
    encode_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tests.fakes.child_environment import child_environment
from tests.fakes.handmade import factor_artifact, linear_artifact
from tests.fakes.waiting import PATIENCE_SECONDS

SAMPLE = encode_checkpoint(
    Checkpoint("0" * 64, 3, {"w": np.arange(4, dtype=np.float32), "step": np.array(2)})
)


def batches(count: int) -> list[dict[str, Array]]:
    rng = np.random.default_rng(1)
    return [
        {
            "x": rng.normal(size=(6, 4)).astype(np.float32),
            "y": rng.normal(size=(6, 3)).astype(np.float32),
        }
        for _ in range(count)
    ]


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    linear_artifact(tmp_path / "linear")
    return tmp_path / "linear"


def assert_same_state(left: Trainer, right: Trainer) -> None:
    for name, array in right.state.items():
        assert np.array_equal(left.state[name], array), name


def test_restoring_continues_bit_for_bit(linear: Path, tmp_path: Path) -> None:
    straight, first, second = Trainer(linear, seed=9), Trainer(linear, seed=9), Trainer(linear)
    data = batches(8)
    losses = [straight.step(batch) for batch in data]
    for batch in data[:3]:
        first.step(batch)
    first.save(tmp_path / "checkpoint")
    for batch in data[:5]:
        second.step(batch)
    second.restore(tmp_path / "checkpoint")
    assert second.step_count == 3
    assert second.seed == 9
    assert_same_state(second, first)
    assert [second.step(batch) for batch in data[3:]] == losses[3:]
    assert_same_state(second, straight)
    assert np.array_equal(second.outputs["seed"], straight.outputs["seed"])


def test_restoring_brings_back_the_sizes_of_axes(tmp_path: Path) -> None:
    factor_artifact(tmp_path / "factors")
    saved, other = Trainer(tmp_path / "factors"), Trainer(tmp_path / "factors")
    rng = np.random.default_rng(0)
    saved.set_parameters(
        {
            "items.weight": rng.normal(size=(50, 4)).astype(np.float32),
            "items.bias": rng.normal(size=50).astype(np.float32),
            "users.weight": rng.normal(size=(1, 4)).astype(np.float32),
        }
    )
    batch: dict[str, Array] = {
        "user": np.zeros(9, np.int64),
        "item": rng.integers(0, 50, 9),
        "rating": np.ones(9, np.float32),
    }
    saved.step(batch)
    saved.save(tmp_path / "checkpoint")
    other.restore(tmp_path / "checkpoint")
    assert other.axes == {"items": 50, "users": 1, "k": 4}
    assert saved.step(batch) == other.step(batch)
    assert_same_state(other, saved)


def test_the_file_is_safetensors_private_and_alone(linear: Path, tmp_path: Path) -> None:
    trainer, folder = Trainer(linear), tmp_path / "here"
    folder.mkdir()
    trainer.save(folder / "a")
    trainer.save(folder / "a")
    assert os.listdir(folder) == ["a"]
    decoded = decode((folder / "a").read_bytes())
    assert decoded.metadata["artifact"] == trainer.artifact.id
    assert set(decoded.tensors) == set(trainer.state)
    if os.name != "nt":
        assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o600
    with pytest.raises(FileNotFoundError):
        trainer.save(tmp_path / "missing" / "a")
    with pytest.raises(FileNotFoundError):
        trainer.restore(folder / "b")


def test_another_artifacts_checkpoint_is_refused(linear: Path, tmp_path: Path) -> None:
    factor_artifact(tmp_path / "factors")
    Trainer(tmp_path / "factors").save(tmp_path / "checkpoint")
    trainer = Trainer(linear)
    trainer.step(batches(1)[0])
    before = trainer.state
    with pytest.raises(CheckpointError, match=r"belongs to artifact .* runs linear"):
        trainer.restore(tmp_path / "checkpoint")
    for name, array in before.items():
        assert np.array_equal(trainer.state[name], array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed": np.zeros(14, np.float32)}, "expected"),
        ({"packed": np.zeros(15, np.float64)}, "expected float32"),
        ({"step": np.array(-1)}, "finished steps"),
        ({"more": np.zeros(1)}, "does not hold the artifact's state"),
        ({"mean": None}, "does not hold the artifact's state"),
    ],
)
def test_state_that_does_not_fit_is_refused(
    linear: Path, tmp_path: Path, change: dict[str, Array | None], message: str
) -> None:
    trainer = Trainer(linear)
    state = {k: v for k, v in {**trainer.state, **change}.items() if v is not None}
    save_checkpoint(tmp_path / "c", Checkpoint(trainer.artifact.id, 4, state))
    with pytest.raises(CheckpointError, match=message):
        trainer.restore(tmp_path / "c")
    assert trainer.seed == 0
    assert_same_state(trainer, Trainer(linear))


def test_damage_leaves_the_trainer_unchanged(linear: Path, tmp_path: Path) -> None:
    trainer, path = Trainer(linear), tmp_path / "c"
    trainer.step(batches(1)[0])
    trainer.save(path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    trainer.step(batches(2)[1])
    before = trainer.state
    with pytest.raises(CheckpointError, match="damaged"):
        trainer.restore(path)
    for name, array in before.items():
        assert np.array_equal(trainer.state[name], array)


@given(st.integers(0, len(SAMPLE) - 1), st.integers(0, 7))
def test_every_flipped_bit_is_noticed(position: int, bit: int) -> None:
    data = bytearray(SAMPLE)
    data[position] ^= 1 << bit
    with pytest.raises(CheckpointError):
        decode_checkpoint(bytes(data))


@given(st.integers(0, len(SAMPLE)), st.binary(max_size=80))
def test_only_checkpoint_errors_escape(cut: int, noise: bytes) -> None:
    assert decode_checkpoint(SAMPLE).seed == 3
    for data in (noise, SAMPLE[:cut] + noise, SAMPLE[:cut] + noise + SAMPLE[cut + len(noise) :]):
        if data != SAMPLE:
            with pytest.raises(CheckpointError):
                decode_checkpoint(data)


SAVER = """
import sys, numpy as np
from device_sdk.runtime.state import Checkpoint, save_checkpoint
state = np.zeros(500_000, np.float32)
for step in range(100_000):
    state.fill(step)
    save_checkpoint(sys.argv[1], Checkpoint("a", step, {"w": state}))
    if step == 0:
        print("ready", flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_process_killed_while_saving_leaves_a_whole_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path, seen, torn = tmp_path / "c", [], 0
    for _ in range(6):
        path.unlink(missing_ok=True)
        child = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        assert child.stdout.readline() == "ready\n"
        time.sleep(float(rng.uniform(0, 0.05)))
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=PATIENCE_SECONDS)
        child.stdout.close()
        found = load_checkpoint(path)
        assert (found.state["w"] == found.seed).all()
        seen.append(found.seed)
        torn += (tmp_path / ".c.partial").exists()
        # What a crash leaves behind is no obstacle to the next save.
        save_checkpoint(path, Checkpoint("a", 1, {}))
        assert os.listdir(tmp_path) == ["c"]
    # Otherwise the kills came too early or too late to test anything.
    assert torn > 0 or len(set(seen)) > 1


def test_a_full_disk_leaves_the_old_file(linear: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    Trainer(linear).save(tmp_path / "c")
    before = (tmp_path / "c").read_bytes()
    code = (
        "import resource, signal, sys\n"
        "from device_sdk import Trainer\n"
        f"trainer = Trainer({str(linear)!r})\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))\n"
        "try:\n"
        f"    trainer.save({str(tmp_path / 'c')!r})\n"
        "except OSError:\n"
        "    sys.exit(7)\n"
    )
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=PATIENCE_SECONDS, check=False, env=child_environment()
    )
    assert done.returncode == 7
    assert (tmp_path / "c").read_bytes() == before
    assert not (tmp_path / ".c.partial").exists()
