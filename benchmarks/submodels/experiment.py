"""A run as data, what it finds, and the rows, whose rates were chosen on validation samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.harness import Row

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Of the full model, by class: a quarter of the devices each."""

Fleet = Literal["unequal", "full", "smallest", "strong", "alone"]
Kind = Literal["ranks", "widths"]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run over virtual devices.

    Attributes:
        seed: of the dealing, first weights, cohorts and samples' order.
        data: ``fashion``, Fashion-MNIST's pictures in ten classes; ``next-item``, what MovieLens
            100K's users watch next, a user a device.
        skew: of the Dirichlet draw by which a class's samples are dealt; small is unlike.
        fleet: ``unequal`` is a quarter of the devices at each of ``SHARES``; in ``full`` and
            ``smallest`` all train the same; in ``strong`` only the quarter that affords the full
            model takes part; ``alone`` is as ``unequal``, and nobody exchanges anything.
        kind: what a smaller model is of the full one: its layers at a lower rank, or narrower.
        learning_rate: of the devices' plain SGD, of next items their Adam, fresh in each round.
        rounds, devices, cohort, steps, batch_size: of the fleet; ``steps`` local ones a round.
    """

    seed: int
    data: Literal["fashion", "next-item"]
    skew: float
    fleet: Fleet
    kind: Kind
    learning_rate: float
    rounds: int = 60
    devices: int = 100
    cohort: int = 20
    steps: int = 10
    batch_size: int = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """At the round that validation picks: accuracy, or HR@10 among all items, by class of device,
    smallest first, of the model that each holds; and bytes of a device's updates and broadcasts in
    a round, by class.

    ``milliseconds``: processor time of a train step, by class. ``failed``: trainings that came to
    no update in all rounds, for their loss was not finite.
    """

    round: int
    validation: tuple[float, ...]
    test: tuple[float, ...]
    up_bytes: tuple[float, ...]
    down_bytes: tuple[float, ...]
    milliseconds: tuple[float, ...]
    failed: int = 0

    @property
    def mean(self) -> float:
        """Over the fleet's devices, whose classes are equally large."""
        return sum(self.test) / len(self.test)

    @property
    def chosen_by(self) -> float:
        """The same on validation samples."""
        return sum(self.validation) / len(self.validation)


BASELINE = "all full"
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""That were tried for each row; the best on validation is the row's."""


def _row(
    table: str, skew: float, name: str, shows: str, fleet: Fleet, kind: Kind, rate: float
) -> Row[Experiment]:
    return Row(
        name,
        shows,
        lambda seed, rate=rate: Experiment(seed, "fashion", skew, fleet, kind, rate),
        table,
    )


def _table(table: str, skew: float, rates: Callable[[str], float]) -> tuple[Row[Experiment], ...]:
    rows: tuple[tuple[str, str, Fleet, Kind], ...] = (
        (BASELINE, "every device trains the full model", "full", "ranks"),
        (
            "low rank",
            "a quarter each at 1/8, 1/4, 1/2 of the rank and at the full model",
            "unequal",
            "ranks",
        ),
        (
            "slices",
            "a quarter each at 1/8, 1/4, 1/2 of the width and at the full model",
            "unequal",
            "widths",
        ),
        ("all smallest, low rank", "every device at 1/8 of the rank", "smallest", "ranks"),
        ("all smallest, slices", "every device at 1/8 of the width", "smallest", "widths"),
        (
            "only the strong",
            "the quarter that affords the full model; its truncations serve the rest",
            "strong",
            "ranks",
        ),
        ("alone", "nothing exchanged: each device its own rank", "alone", "ranks"),
    )
    return tuple(_row(table, skew, *row, rates(row[0])) for row in rows)


def _next_items() -> tuple[Row[Experiment], ...]:
    rows: tuple[tuple[str, str, Fleet], ...] = (
        (BASELINE, "every device trains the full width of 64", "full"),
        ("slices", "a quarter each at widths of 8, 16, 32 and 64", "unequal"),
        ("all smallest, slices", "every device at a width of 8", "smallest"),
        ("only the strong", "the quarter that affords 64; its slices serve the rest", "strong"),
        ("alone", "nothing exchanged: each device its own width", "alone"),
    )

    def run(fleet: Fleet) -> Callable[[int], Experiment]:
        return lambda seed: Experiment(
            seed, "next-item", 1.0, fleet, "widths", 0.01, 100, 943, 100, 4, 8
        )

    return tuple(Row(name, shows, run(fleet), "next-item") for name, shows, fleet in rows)


def _rate(name: str) -> float:
    return {"alone": 0.1}.get(name, 0.4)


TABLES = {
    "fashion-0.3": "Fashion-MNIST, 100 devices, Dirichlet 0.3: accuracy on 5,000 test pictures",
    "fashion-0.1": "Fashion-MNIST, 100 devices, Dirichlet 0.1: accuracy on 5,000 test pictures",
    "next-item": "MovieLens 100K, what 943 users watch next: HR@10 among all items",
}
ROWS = (*_next_items(), *_table("fashion-0.3", 0.3, _rate), *_table("fashion-0.1", 0.1, _rate))
