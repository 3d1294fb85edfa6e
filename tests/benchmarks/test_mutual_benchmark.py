from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.channels import MutualChannel, sealed_bytes
from benchmarks.datasets.pictures import load_mnist, load_pacs64
from benchmarks.mutual.__main__ import MutualSuite, mean_table, validation_table
from benchmarks.mutual.domains import Domain, turned_clockwise
from benchmarks.mutual.experiment import ROWS, TABLES, DeviceScore, Experiment, Outcome
from benchmarks.mutual.fleets import ArtifactShelf, Scoreboard, execute
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update

DATA = Path(os.environ.get("TESSERA_DATA", "../shared/data"))
needs_mnist = pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason=f"no MNIST in {DATA}")
needs_pacs = pytest.mark.skipif(not (DATA / "pacs64").is_dir(), reason=f"no PACS in {DATA}")


def outcome(acc: float) -> Outcome:
    scores = tuple(DeviceScore(3, 90.0, acc + place, 95.0, 80.0) for place in range(4))
    return Outcome(scores, (50.0, 90.0), 3, 1000.0, 3000.0, 0.25, 12.0)


def tiny_domains(size: int = 28) -> list[Domain]:
    """Two classes, told apart by which half is bright, four domains of different brightness."""
    domains = []
    for place in range(4):
        rng = np.random.default_rng(place)

        def part(count: int, rng: np.random.Generator = rng, place: int = place):  # type: ignore[no-untyped-def]
            y = rng.integers(0, 2, count).astype(np.int64)
            x = rng.random((count, 1, size, size), dtype=np.float32) * 0.2
            x[y == 1, :, : size // 2] += 0.5 + place / 8
            return {"x": x, "y": y}

        domains.append(Domain(f"D{place}", 10, part(24), part(8), part(10), part(12)))
    return domains


def test_images_turn_clockwise() -> None:
    image = np.arange(9, dtype=np.uint8).reshape(1, 3, 3)
    assert turned_clockwise(image, 90)[0].tolist() == [[6, 3, 0], [7, 4, 1], [8, 5, 2]]
    np.testing.assert_array_equal(turned_clockwise(image, 0), image)
    np.testing.assert_array_equal(turned_clockwise(image, 180), image[:, ::-1, ::-1])
    blob = np.zeros((1, 21, 21), np.uint8)
    blob[0, 3:6, 9:12] = 200
    there = turned_clockwise(blob, 40)
    assert there[0, :, 11:].sum() > there[0, :, :10].sum()  # from the top towards the right
    back = turned_clockwise(there, -40)
    assert back[0, 4, 10] > 150 and abs(int(there.sum()) - int(blob.sum())) < 0.02 * blob.sum()


@needs_mnist
def test_mnist_is_the_publishers_and_other_files_are_refused(tmp_path: Path) -> None:
    images = load_mnist(DATA, "t10k")
    assert images.x.shape == (10_000, 28, 28) and images.y[:3].tolist() == [7, 2, 1]
    (tmp_path / "mnist").mkdir()
    with pytest.raises(FileNotFoundError, match="TESSERA_DATA"):
        load_mnist(tmp_path)
    for kind in ("images-idx3", "labels-idx1"):
        source = DATA / "mnist" / f"train-{kind}-ubyte.gz"
        (tmp_path / "mnist" / f"t10k-{kind}-ubyte.gz").write_bytes(source.read_bytes())
    with pytest.raises(ValueError, match="publisher"):
        load_mnist(tmp_path, "t10k")
    with pytest.raises(ValueError, match="'train' or 't10k'"):
        load_mnist(DATA, "test")


@needs_pacs
def test_pacs_is_checked() -> None:
    photos = load_pacs64(DATA, "photo")
    assert photos.x.shape == (1670, 3, 64, 64) and set(photos.y.tolist()) == set(range(7))
    with pytest.raises(ValueError, match="expected one of photo"):
        load_pacs64(DATA, "painting")


@needs_mnist
@pytest.mark.parametrize("split", ["independent", "by-image"])
def test_domains_are_split_as_the_paper_says(split: str) -> None:
    from benchmarks.mutual.domains import rotated_mnist

    domains = rotated_mnist(DATA, 0.05, split, np.random.default_rng(0))  # type: ignore[arg-type]
    sizes = [
        tuple(len(part["y"]) for part in (d.private, d.public, d.validation, d.test))
        for d in domains
    ]
    assert sizes == [(700, 50, 100, 150)] * 4
    kinds = np.concatenate(
        [part["y"] for part in (domains[0].private, domains[0].public, domains[0].validation)]
        + [domains[0].test["y"]]
    )
    assert np.bincount(kinds).tolist() == [100] * 10
    same = all(np.array_equal(domains[0].test["y"], d.test["y"]) for d in domains)
    assert same == (split == "by-image")
    x = domains[1].private["x"]
    assert (x.shape[1:], x.dtype, float(x.min()), float(x.max())) == ((1, 28, 28), "f4", 0.0, 1.0)
    with pytest.raises(ValueError, match="leaves no private"):
        rotated_mnist(DATA, 0.75, "by-image", np.random.default_rng(0))


def test_tables_show_means_and_the_paper_beside_them() -> None:
    rows = {row.name: row for row in ROWS if row.table == "independent"}
    one, other, *_ = rows
    found = {one: {0: outcome(80), 1: outcome(82)}, other: {}}
    table = mean_table(rows, found)
    assert "82.5 ± 1.4 (87.8)" in table and "25 %" in table and "3 kB" in table
    assert other not in table
    shown = MutualSuite().shown("independent", found, argparse.Namespace(validation=False))
    assert "81.0 / 95.0 / 80.0" in "".join(shown)
    assert "90.0" in validation_table(rows, found) and "82.5" not in validation_table(rows, found)
    assert outcome(80).mean("acc", leave_out=3) == 81


def test_every_row_is_an_experiment_of_its_table() -> None:
    assert {row.table for row in ROWS} == set(TABLES)
    assert len({(row.table, row.name) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        experiment = row.make(5)
        assert experiment.seed == 5
        if row.equal_bytes:
            assert (row.table, row.equal_bytes) in {(one.table, one.name) for one in ROWS}
    with pytest.raises(ValueError, match="goes with its own settings"):
        replace(ROWS[0].make(0), method="alone")


def test_the_channel_counts_samples_once_and_labels_each_round() -> None:
    channel = MutualChannel("float16", np.random.default_rng(0))
    labels = np.full((5, 10), 0.1, np.float16)
    attachment = Attachment({"x": np.zeros((50, 100), np.uint8)})
    for _ in range(3):
        channel.down(Broadcast(1, 0, {"labels.a": labels}))
        channel.fetch(0, attachment)
        sent = channel.up(Update(1, {"labels": labels}, {"local_loss": 0.5}))
    np.testing.assert_array_equal(sent.tensors["labels"], labels)
    broadcast = channel.down_bytes - sealed_bytes(5000 + 17)
    assert 0 < broadcast < 3 * 600 and broadcast % 3 == 0
    assert channel.up_bytes % 3 == 0 and 100 < channel.up_bytes / 3 < 400


def test_the_best_round_is_picked_by_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        """Predicts class 1 for the first ``right`` of the samples, else 0."""

        artifact = SimpleNamespace(rows=lambda entries: (1, False))

        def __init__(self) -> None:
            self.right = 0.0

        def predict(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            count = len(batch["x"])
            hot = (np.arange(count) < self.right * count).astype(int)
            return {"probabilities": np.eye(2, dtype=np.float32)[hot]}

    domains = tiny_domains()
    ones = [
        replace(
            d,
            validation={**d.validation, "y": np.ones(10, np.int64)},
            test={**d.test, "y": np.ones(12, np.int64)},
        )
        for d in domains
    ]
    board, model = Scoreboard(ones), Fixed()
    for round_id, right in enumerate((0.25, 0.75, 0.5), start=1):
        model.right = right
        board.look(round_id, [model] * 4)  # type: ignore[list-item]
    assert board.curve == [25.0, 75.0, 50.0]
    assert [score.round for score in board.scores] == [2] * 4
    assert [score.bwt for score in board.scores] == [100.0, 100.0, 100.0, 0.0]
    assert board.scores[0].acc == 75.0 and board.scores[3].fwt == 100.0


def quick(experiment: Experiment) -> Experiment:
    """Two short rounds of it."""
    mutual, fedavg = experiment.mutual, experiment.fedavg
    return replace(
        experiment,
        rounds=2,
        steps=min(experiment.steps, 10),
        mutual=mutual and replace(mutual, local_steps=10, batch_size=16, public_batch=4),
        fedavg=fedavg and replace(fedavg, epochs=3, batch_size=8),
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_method_runs_from_end_to_end(tmp_path: Path) -> None:
    cache = ArtifactShelf(tmp_path / "artifacts")
    rows = {row.name: row for row in ROWS if row.table in ("independent", "variants")}
    names = ("MAFML 10%", "AGG 10%", "FedMD 10%", "IND", "FedAvg, full", "device 4 random")
    for name in names:
        found = execute(quick(rows[name].make(0)), tiny_domains(), cache, lambda text: None)
        assert len(found.devices) == 4 and found.mean("acc") > 60, name
        assert (found.bytes > 0) == (name != "IND"), name
    limited = replace(quick(rows["FedAvg, full"].make(0)), rounds=9, most_bytes=600_000)
    found = execute(limited, tiny_domains(), cache, lambda text: None)
    assert found.rounds == 2 and found.bytes <= 600_000
