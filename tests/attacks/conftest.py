"""A stage that ends with the test, and is judged by the oracle of the long runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.attacks.stage import Stage
from tests.faults.oracle import judge

MakeStage = Callable[..., Stage]


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of commits, and no power to fail."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def make_stage(memory_path: Path) -> Iterator[MakeStage]:
    """Makes a stage; at the end the living have to go on, then both ends die, and nothing may be
    lost or counted twice."""
    stages: list[Stage] = []

    def make(*, judged: bool = True, **options: object) -> Stage:
        stage = Stage(memory_path, **options)  # type: ignore[arg-type]
        stage.judged = judged
        stages.append(stage)
        return stage

    yield make
    for stage in stages:
        try:
            stage.live_on()
        finally:
            stage.close()
        if stage.judged:
            judge(stage.fleet)


@pytest.fixture
def stage(make_stage: MakeStage) -> Stage:
    """Three devices that have taken part in one round."""
    made = make_stage()
    made.run_until(lambda: made.parts.first.aggregation.version == 1)
    made.run(1.0)
    return made
