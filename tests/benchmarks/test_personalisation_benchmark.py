"""Models of devices' own: PFLlib's split, a run of each kind, how a setting is picked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from sklearn.model_selection import train_test_split

from benchmarks.datasets.pfllib import DEVICES, DevicePictures, Pictures, deal
from benchmarks.harness import Artifacts
from benchmarks.personalisation.__main__ import PersonalisationSuite
from benchmarks.personalisation.experiment import ROWS, Experiment, Judged, Method, Outcome
from benchmarks.personalisation.fleet import trained


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    return Artifacts(tmp_path_factory.mktemp("artifacts"))


def test_rows_are_dealt_as_pfllib_does() -> None:
    """Each row once, and of each device three quarters to train with, drawn as scikit-learn draws
    on from the generator that dealt."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 7000))
    dealt = deal(labels)
    rows = [np.concatenate(each) for each in dealt]
    assert len(dealt) == DEVICES
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(len(labels)))
    even = len(labels) / DEVICES
    # The order of a device's rows before they were split is that of the draw.
    rng = np.random.RandomState(1)
    first: list[list[int]] = [[] for _ in range(DEVICES)]
    for label in range(10):
        found = np.flatnonzero(labels == label)
        rng.shuffle(found)
        shares = rng.dirichlet(np.repeat(0.1, DEVICES))
        shares = np.array([s * (len(have) < even) for s, have in zip(shares, first, strict=True)])
        ends = (np.cumsum(shares / shares.sum()) * len(found)).astype(int)[:-1]
        first = [
            have + more.tolist() for have, more in zip(first, np.split(found, ends), strict=True)
        ]
    for have, (train, test) in zip(first, dealt, strict=True):
        ours = train_test_split(np.asarray(have), train_size=0.75, random_state=rng)
        np.testing.assert_array_equal(train, ours[0])
        np.testing.assert_array_equal(test, ours[1])


def made_up(device: int) -> DevicePictures:
    """Two classes, whose pictures are bright in one row each."""
    rng = np.random.default_rng(device)

    def pictures(count: int) -> Pictures:
        label = (device + rng.integers(0, 2, count)) % 10
        x = rng.normal(0, 0.3, (count, 1, 28, 28)).astype(np.float32)
        x[np.arange(count), 0, 2 * label + 1] += 2
        return Pictures(x, label.astype(np.int64))

    return DevicePictures(pictures(40), pictures(20), pictures(30))


@pytest.mark.parametrize("method", get_args(Method))
def test_a_run_of_every_kind(method: Method, shelf: Artifacts) -> None:
    run = Experiment(0, method, 0.1, 0.5, rounds=6)
    devices, told = [made_up(device) for device in range(3)], list[str]()
    found = trained(run, devices, shelf, told.append)
    assert set(found.judged) == ({"own", "shared"} if method == "fine-tuned" else {"own"})
    own = found.judged["own"]
    assert len(own.curve) == len(told) == 2 and own.validation == max(own.curve)
    assert own.test > 0.5 and own.mean == pytest.approx(np.mean(own.by_device))
    assert (found.up_bytes > 0) == (found.down_bytes > 0) == (method != "alone")
    again = trained(run, devices, shelf, lambda _: None)
    assert again == replace(found, milliseconds=again.milliseconds)


class Made(PersonalisationSuite):
    """Better the nearer the rate is to 0.03, on validation pictures; on the others, the farther."""

    def execute(self, run: Experiment, *_: object) -> Outcome:
        off = abs(run.learning_rate - 0.03) + run.strength / 100 + run.seed / 1000
        judged = Judged(20, 1 - off, off, off / 2, [off, 0.0], [1 - off])
        return Outcome({"own": judged, "shared": judged}, 1e3, 2e3, 5.0)


def test_validation_of_the_first_seed_picks_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(len(row.settings) <= 6 for row in ROWS)
    given = ["--results", str(tmp_path)]
    suite = Made()
    assert suite.main(given) == 0
    printed = capsys.readouterr().out
    assert "| Ditto" in printed and "| 97.47" in printed and "0.03, 0.1" in printed
    ran = (tmp_path / "personalisation.jsonl").read_text()
    assert suite.main([*given, "--table-only"]) == 0
    assert capsys.readouterr().out == printed
    assert (tmp_path / "personalisation.jsonl").read_text() == ran
    assert suite.main([*given, "--settings", "--rows", "Ditto"]) == 0
    assert "| 0.03, 1 " in capsys.readouterr().out
