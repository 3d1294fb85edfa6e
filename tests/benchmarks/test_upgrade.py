"""The first release's devices, aggregators and homes, as its wheel made them, beside this code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.aggregator.broker import MOSQUITTO, running_mosquitto
from benchmarks.harness import RESULTS, StoredRuns
from benchmarks.upgrade.__main__ import (
    DIRECTIONS,
    METHODS,
    Run,
    Said,
    made_home,
    main,
    outcome,
    served,
    started,
    took_part,
)
from benchmarks.upgrade.release import FIRST, NotHere, Release, built, this
from tests.fakes.waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "upgrading.md"
RUNS = [Run(method, *ends) for method in METHODS for ends in DIRECTIONS.values()]
needs_mosquitto = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """The first release."""
    pytest.importorskip("hatchling", reason="hatchling is not installed (extra dev)")
    try:
        yield built(FIRST, tmp_path_factory.mktemp("first") / "site")
    except NotHere as error:
        pytest.skip(str(error))


def test_the_page_has_the_table_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--table-only"]) == 0
    printed = capsys.readouterr().out
    assert "not run" not in printed
    assert printed in PAGE.read_text()


@needs_mosquitto
@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "run", RUNS, ids=lambda run: f"{run.method} {run.devices}-{run.aggregator}"
)
def test_who_learns_from_whom_is_as_the_table_says(
    run: Run, first: Release, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra export)")
    stored = StoredRuns[Run, Said](RESULTS, "upgrade", Said).load(run)
    assert outcome(run, {FIRST: first, "this": this()}, tmp_path) == stored


@needs_mosquitto
@pytest.mark.slow
@pytest.mark.exhaustive  # a machine at load 25 has seen it wait in vain once
def test_a_home_of_the_first_release_goes_on_and_the_copy_goes_back(
    first: Release, tmp_path: Path
) -> None:
    now, home, copy = this(), tmp_path / "home", tmp_path / "copy"
    homes = [tmp_path / "device-0", tmp_path / "device-1"]
    log = tmp_path / "log"

    def version(release: Release) -> int:
        (task,) = json.loads(release.aggregator("status", home, "--json"))["tasks"]
        return int(task["version"])

    with running_mosquitto(tmp_path) as broker:
        method, lines = METHODS["scatter, BPR"]
        made_home(first, home, method, lines, broker.url())
        codes = first.aggregator("invite", home, "--count", "2").split()

        def rounds(*releases: Release) -> list[str]:
            return took_part(
                [
                    started(release, broker.url(), codes[number], homes[number], method, number)
                    for number, release in enumerate(releases)
                ]
            )

        with served(first, home, log):
            assert rounds(first, first) == ["", ""]
            wait_until(lambda: version(first) > 0, log.read_text)
        before = version(first)
        shutil.copytree(home, copy)

        now.run("-m", "aggregator.cli", "task", "check", "--home", home)
        # One device is of this release from now on, in the home that it has.
        with served(now, home, log):
            assert rounds(now, first) == ["", ""]
            wait_until(lambda: version(now) > before, log.read_text)

        # And back: the copy takes the home's place.
        shutil.rmtree(home)
        copy.rename(home)
        assert version(first) == before
        first.aggregator("restored", home)
        with served(first, home, log):
            assert rounds(now, first) == ["", ""]
            wait_until(lambda: version(first) > before, log.read_text)
