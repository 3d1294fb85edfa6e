"""Calls of onnxruntime that do not come back are ended from another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from device_sdk import Trainer
from device_sdk.errors import CallEnded
from device_sdk.system.watch import Watch
from device_sdk.trial import example_batch
from tests.fakes.bombs import make_bomb
from tests.fakes.handmade import linear_artifact
from tests.fakes.quick import run_python


class Leaping:
    """Each look at the clock is an hour later."""

    def __init__(self) -> None:
        self.looks = 0

    def now(self) -> float:
        self.looks += 1
        return 3600.0 * self.looks

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps by this clock")


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("watch") / "linear"
    linear_artifact(folder)
    yield folder


def test_a_loop_without_end_is_ended_and_the_trainer_goes_on(linear: Path, tmp_path: Path) -> None:
    watch = Watch(Leaping())
    trainer = Trainer(make_bomb("late-loop", linear, tmp_path / "bomb"), watch=watch)
    batch = example_batch(trainer.artifact, "train")
    trainer.step(batch)
    with watch.during(1.0), pytest.raises(CallEnded, match="did not end in its time"):
        trainer.step(batch)
    assert watch.ended == "too-long"
    with pytest.raises(CallEnded):  # until something begins anew
        trainer.step(batch)
    trainer.reset()
    with watch.during(1e9):
        assert np.isfinite(trainer.step(batch))
    assert watch.ended == ""


def test_whoever_stops_ends_what_runs_and_what_would_be_opened(
    linear: Path, tmp_path: Path
) -> None:
    watch = Watch()
    trainer = Trainer(make_bomb("loop", linear, tmp_path / "bomb"), watch=watch)
    batch = example_batch(trainer.artifact, "train")
    with watch.during(1e9):
        threading.Timer(0.2, watch.end, ["stopped"]).start()
        with pytest.raises(CallEnded, match="was stopped"):
            trainer.step(batch)
    with watch.during(1e9), pytest.raises(CallEnded, match="was stopped"):
        Trainer(linear, watch=watch)
    Trainer(linear, watch=Watch()).step(batch)


def test_many_calls_within_their_time_are_not_ended_however_long_they_take_together(
    linear: Path,
) -> None:
    watch = Watch(Leaping())
    trainer = Trainer(linear, watch=watch)
    batch = example_batch(trainer.artifact, "train")
    with watch.during(7200.5):
        for _ in range(200):
            trainer.step(batch)
    assert watch.ended == "" and watch.calls % 2 == 0


class Jumping(Leaping):
    """An hour passes at once, and then none: the process was not run, and now is."""

    def now(self) -> float:
        self.looks += 1
        return 3600.0 * (self.looks > 8)


def test_a_process_that_was_asleep_ends_no_call_for_it(linear: Path, tmp_path: Path) -> None:
    clock = Jumping()
    watch = Watch(clock)
    trainer = Trainer(make_bomb("loop", linear, tmp_path / "bomb"), watch=watch)
    end = threading.Thread(target=_end_after, args=(watch, clock, 16))
    with watch.during(0.4):
        end.start()
        with pytest.raises(CallEnded, match="was stopped"):
            trainer.step(example_batch(trainer.artifact, "train"))
    end.join()
    assert watch.ended == "stopped", "and not too-long"


def _end_after(watch: Watch, clock: Jumping, looks: int) -> None:
    while clock.looks < looks and not watch.ended:
        time.sleep(0.01)
    watch.end("stopped")


_NO_THREADS = """
import sys, threading
from device_sdk import Trainer
from device_sdk.system.watch import Watch
from device_sdk.trial import example_batch
watch = Watch()
trainer = Trainer(sys.argv[1], watch=watch)
batch = example_batch(trainer.artifact, "train")
before = threading.stack_size(2**45)
try:
    with watch.during(60.0):
        print("nothing runs unwatched")
except RuntimeError as error:
    print(error)
threading.stack_size(before)
with watch.during(60.0):
    trainer.step(batch)
print("ended" if watch.ended else "watched")
"""


def test_where_no_thread_is_to_be_had_this_training_fails_and_the_next_is_watched(
    linear: Path,
) -> None:
    """In a process of its own: of a thread that could not start CPython 3.11 keeps a state under
    the name of the thread that asked for it, where exceptions for that one then go."""
    done = run_python("-c", _NO_THREADS, linear)
    assert done.stdout.split("\n")[:2] == ["can't start new thread", "watched"], done.stderr


@pytest.mark.skipif(
    tuple(map(int, ort.__version__.split(".")[:2])) < (1, 31), reason="it has no bound on folding"
)
def test_constants_made_of_a_few_numbers_are_not_computed_when_a_session_is_opened(
    linear: Path, tmp_path: Path
) -> None:
    """4e12 products of 1 GiB each would be: the opening takes what every other one does."""
    trainer = Trainer(make_bomb("constants", linear, tmp_path / "bomb"), providers="cpu")
    assert trainer.step_count == 0
