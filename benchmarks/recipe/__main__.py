"""``python -m benchmarks.recipe``: what devices with a few rows learn by the defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

import export
from aggregator.methods.fedavg import FedAvgBinding, FedAvgSettings
from benchmarks.channels import HalfChannel, require_sound
from benchmarks.harness import Artifacts, BySeed, Cell, Row, Suite, data_folder, table_of
from benchmarks.recipe.tables import TABLES, Dealt, Rows, joined
from benchmarks.simulation import Simulation, device_name
from device_sdk import LocalData, Trainer
from device_sdk.artifact import load_artifact
from device_sdk.local_data import DataSource
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.local_steps import LEAST_STEPS, SampleStream, predict_all

_ROUNDS = 20
_EARLY = 5
_BATCH = 32
_AUTHORS = export.Adam(lr=1e-3)


@dataclass(frozen=True, slots=True)
class Experiment:
    """All ways of a table; ``data``: one of ``TABLES``."""

    data: str
    seed: int
    rounds: int = _ROUNDS


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares of right answers on the test rows, by way and round.

    ``majority``: what naming the commonest class alone reaches; ``error``: its standard error;
    ``rate``: what the trial at export found.
    """

    majority: float
    error: float
    rate: float
    right: Mapping[str, tuple[float, ...]]

    def leaves(self, way: str) -> int:
        """The round from which on the model is better than the commonest class by more than that
        one's standard error; one more than there were where it never is."""
        short = [right <= self.majority + self.error for right in self.right[way]]
        return len(short) - next((n for n, each in enumerate(short[::-1]) if each), len(short)) + 1


class _Network(nn.Module):
    """Two layers, behind batch norm where the columns are as they were measured."""

    def __init__(self, columns: int, classes: int, *, scaled: bool) -> None:
        super().__init__()
        norm = nn.Identity() if scaled else nn.BatchNorm1d(columns)
        self.layers = nn.Sequential(norm, nn.Linear(columns, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits, batch["label"]), {"logits": logits}


def _write(folder: Path, dealt: Dealt, seed: int, optimizer: export.Optimizer | None) -> None:
    torch.manual_seed(seed)
    example = joined(dealt.devices)[:_BATCH]
    export.train_step(
        _Network(example.x.shape[1], dealt.classes, scaled=dealt.scaled),
        _loss,
        {name: torch.from_numpy(array) for name, array in example.arrays.items()},
        optimizer=optimizer,
        dynamic={name: {0: "batch"} for name in example.arrays},
        directory=folder,
        verify=False,
    )


def _right(trainer: Trainer, test: Rows) -> float:
    found = predict_all(trainer, {"x": test.x}, "logits").argmax(axis=1)
    return float((found == test.label).mean())


def _averaged(
    dealt: Dealt, folder: Path, training: FedAvgTraining, run: Experiment
) -> Iterator[float]:
    """By round, how right the averaged model is."""
    rng = np.random.default_rng([run.seed, 1])
    trainer = Trainer(folder, providers="cpu", seed=run.seed)
    settings = FedAvgSettings(training=training)
    method = FedAvgBinding("fedavg", settings).build(0, rng, [load_artifact(folder)])
    learners = [
        FedAvgLearner(
            _source(rows), trainer, device_name(n), np.random.default_rng([run.seed, 2, n])
        )
        for n, rows in enumerate(dealt.devices)
    ]
    simulation = Simulation(method, learners, rng, HalfChannel(len(learners)))
    for _ in range(run.rounds):
        simulation.round()
        trainer.set_parameters(method.model_arrays or {})
        yield _right(trainer, dealt.test)
    require_sound(simulation)


def _source(rows: Rows) -> DataSource:
    return lambda: LocalData(rows.arrays)


def _by_itself(own: Rows, test: Rows, folder: Path, run: Experiment) -> Iterator[float]:
    """As many steps on these rows as a device takes in each round."""
    trainer = Trainer(folder, providers="cpu", seed=run.seed)
    stream = SampleStream(own.arrays, _BATCH, np.random.default_rng([run.seed, 3]))
    for _ in range(run.rounds):
        for _ in range(LEAST_STEPS):
            trainer.step(stream.draw())
        yield _right(trainer, test)


def execute(
    run: Experiment, root: Path, artifacts: Artifacts, progress: Callable[[str], None]
) -> Outcome:
    """All ways of a table."""
    dealt = TABLES[run.data](root, np.random.default_rng([run.seed, 0]))

    def artifact(by: str, optimizer: export.Optimizer | None) -> Path:
        described = {"recipe": run.data, "seed": run.seed, "optimizer": by}
        return artifacts.path(described, lambda into: _write(into, dealt, run.seed, optimizer))

    authors, tried = artifact("0.001", _AUTHORS), artifact("tried", None)
    alone = [[*_by_itself(rows, dealt.test, tried, run)] for rows in dealt.devices]
    progress("alone")
    majority = float(np.bincount(dealt.test.label).max() / len(dealt.test.label))
    right = {
        "before": _averaged(dealt, authors, FedAvgTraining(epochs=1), run),
        "at 0.001": _averaged(dealt, authors, FedAvgTraining(), run),
        "now": _averaged(dealt, tried, FedAvgTraining(), run),
        "alone": iter(np.mean(alone, axis=0).tolist()),
        "pooled": _by_itself(joined(dealt.devices), dealt.test, tried, run),
    }
    return Outcome(
        majority,
        float(np.sqrt(majority * (1 - majority) / len(dealt.test.label))),
        float(load_artifact(tried).manifest.rate or 0.0),
        {way: tuple(curve) for way, curve in right.items()},
    )


class RecipeSuite(Suite[Experiment, Outcome]):
    name = "recipe"
    description = """\
Devices with 20 to 40 rows of a table average a small network by the defaults of [fedavg.training]:
as they were (one pass; Adam at 0.001, as the exporter's pages had it), as they are with that same
rate, and as they are where the author says no rate and the export's trial finds one; beside them
each device alone, and all rows in one place. Finished runs are stored; --table-only prints them."""
    outcome = Outcome
    tables: Mapping[str, str] = {
        "": "In which round the model leaves the commonest class, and % right after 5 and 20"
    }
    rows = tuple(
        Row(name, (deal.__doc__ or "").strip(), lambda seed, name=name: Experiment(name, seed))
        for name, deal in TABLES.items()
    )
    exports = True

    def execute(
        self, run: Experiment, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        root = data_folder(options.root, "beijing-air")
        return execute(run, root, Artifacts(options.artifacts), progress)

    def shown(
        self, table: str, outcomes: Mapping[str, BySeed[Outcome]], options: argparse.Namespace
    ) -> Iterator[str]:
        ways = ("before", "at 0.001", "now")
        yield table_of(
            outcomes,
            {
                "the commonest class": _percent(lambda one: one.majority),
                **{f"{way}: leaves it in round": _leaves(way) for way in ways},
                "rate by trial": lambda _, found: _listed(one.rate for one in found.values()),
            },
        )
        for round_ in (_EARLY, _ROUNDS):
            yield table_of(
                outcomes,
                {f"{way}, after {round_}": _right_after(way, round_) for way in WAYS},
                seeds=False,
            )


WAYS = ("before", "at 0.001", "now", "alone", "pooled")


def _percent(read: Callable[[Outcome], float]) -> Cell[Outcome]:
    return lambda _, found: f"{100 * fmean(map(read, found.values())):.1f}"


def _right_after(way: str, round_: int) -> Cell[Outcome]:
    return _percent(lambda one: one.right[way][round_ - 1])


def _listed(values: Iterator[float]) -> str:
    return ", ".join(f"{each:g}" for each in values)


def _leaves(way: str) -> Cell[Outcome]:
    """By seed."""

    def cell(_: str, found: BySeed[Outcome]) -> str:
        rounds = [(one.leaves(way), len(one.right[way])) for one in found.values()]
        return ", ".join(str(each) if each <= most else f"> {most}" for each, most in rounds)

    return cell


main = RecipeSuite().main

if __name__ == "__main__":
    raise SystemExit(main())
