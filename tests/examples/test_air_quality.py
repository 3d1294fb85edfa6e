from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aggregator.demo.broker import mosquitto_path
from device_sdk.methods.attention.mixer import AttentionScores, scores_of
from examples.air_quality import main
from examples.attention_picture import weights_between
from tests.benchmarks.test_air_data import write_station

DEVICES = {"a": f"{1:032x}", "b": f"{2:032x}", "c": f"{3:032x}"}


def scores(
    neighbours: str, weights: list[float], share: float, round_id: int = 4
) -> AttentionScores:
    return AttentionScores(
        round_id,
        tuple(DEVICES[name] for name in neighbours),
        np.asarray([weights, weights], np.float32),
        np.asarray([[share, 1 - share]] * 2, np.float32),
    )


def test_weights_find_their_places() -> None:
    moment = {"a": scores("bc", [0.25, 0.75], 0.5), "c": scores("a", [1.0], 0.25)}
    first, second = weights_between(moment, DEVICES)
    np.testing.assert_allclose(first[0], [0, 0.25, 0.75])
    assert np.isnan(first[1]).all()
    np.testing.assert_allclose(first[2], [1, 0, 0])
    np.testing.assert_allclose(second, [0.5, np.nan, 0.25])


def test_scores_survive_a_learners_state() -> None:
    given = scores("bc", [0.25, 0.75], 0.5)
    found = scores_of({**given.state(), "vector": np.zeros(3, np.float32)})
    assert found is not None
    assert found.neighbours == given.neighbours
    np.testing.assert_array_equal(found.first, given.first)
    assert scores_of({}) is None
    for name in given.state():
        with pytest.raises(ValueError, match=r"scores|holds"):
            scores_of({**given.state(), name: np.zeros((7, 7), np.float32)})


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(mosquitto_path() is None, reason="needs Mosquitto")
def test_stations_learn_whom_to_learn_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("Dongsi", "Changping", "Tiantan"):
        write_station(tmp_path, name, {})
    out = tmp_path / "out"
    command = ["--data", str(tmp_path), "--out", str(out), "--stations", "3", "--rounds", "5"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    table = [[cell.strip() for cell in line.split("│")] for line in printed.splitlines()]
    heard = {row[1]: row[5].split()[0] for row in table if len(row) == 8 and "kB" in row[6]}
    assert heard["Dongsi"] == "(mixed"  # the first one leaves that to the aggregator
    assert heard["Changping"] in ("Dongsi", "Tiantan")
    assert heard["Tiantan"] in ("Dongsi", "Changping")
    assert "often than alone" in " ".join(printed.split())
    assert (out / "air_quality.png").stat().st_size > 10_000
