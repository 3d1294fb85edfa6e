"""A run as data, what it finds, and the rows with the settings that are tried for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from aggregator.methods.submodels import Slices
from benchmarks.harness import Row

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Of the full model, by class: a quarter of the devices each."""

Data = Literal["air", "clicks", "next-item", "digits", "fashion", "lora"]
Fleet = Literal[
    "unequal", "full", "smallest", "strong", "alone", "pooled", "frozen", "popular", "fjord",
    "prototypes", "mutual",
]  # fmt: skip
Kind = Literal["ranks", "widths"]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run over virtual devices.

    Attributes:
        data: ``air``, the class of the PM2.5 that follows two days at one of twelve stations;
            ``clicks``, whether MovieLens 1M's users like a movie, a user a device; ``next-item``,
            what MovieLens 100K's users watch next, a user a device; ``digits``, V-MNIST, six
            variants of handwriting; ``fashion``, Fashion-MNIST's pictures in ten classes; ``lora``,
            turned digits by adapters on a transformer that was trained on others' upright ones.
        skew: of the Dirichlet draw by which Fashion-MNIST is dealt; small is unlike.
        fleet: ``unequal`` is a quarter of the devices at each of ``SHARES``; in ``full`` and
            ``smallest`` all train the same; in ``strong`` only the quarter that affords the full
            model takes part; ``alone`` is as ``unequal``, and nobody exchanges anything;
            ``pooled`` trains one full model on all devices' samples, as many steps as the fleet's;
            ``frozen`` is the first model; ``popular`` recommends the most watched to all. In
            ``fjord`` each step of a device trains a part drawn from those up to its own; in
            ``prototypes`` and ``mutual`` each class has a network of its own width, and what is
            exchanged are mean embeddings by class, or soft labels of shared samples.
        kind: what a smaller model is of the full one: its layers at a lower rank, or narrower.
        slices: of narrower ones, which units they have; see
            :class:`~aggregator.methods.fedavg.FedAvgSettings`.
        learning_rate: of the devices' SGD; of adapters Adam.
        server: rate of the server's Adam; 0 for the plain mean.
        rounds, devices, cohort, steps, batch_size: of the fleet; ``steps`` local ones a round.
        whole: of pictures, the layers that no rung factors.
        taught, temperature: of pictures, in smaller rungs: weight of the divergence from what the
            full model says of the device's samples as a round begins, and how soft that is.
        small_rate: of smaller rungs, times the learning rate.
    """

    seed: int
    data: Data
    skew: float
    fleet: Fleet
    kind: Kind
    learning_rate: float
    server: float
    rounds: int
    devices: int
    cohort: int
    steps: int
    batch_size: int
    slices: Slices = "static"
    whole: tuple[str, ...] = ()
    taught: float = 0.0
    temperature: float = 1.0
    small_rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """At the round that validation picks: quality by class of device, smallest first, of the model
    that each holds; and bytes of a device's updates and broadcasts in a round, by class.

    ``milliseconds``: processor time of a train step, by class. ``failed``: trainings that came to
    no update in all rounds, for their loss was not finite; of devices alone, such steps.
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


@dataclass(frozen=True, slots=True)
class Setting:
    """What is tried for a row; see :class:`Experiment`."""

    learning_rate: float
    server: float = 0.0

    def __str__(self) -> str:
        more = f", Adam {self.server:g}" if self.server else ""
        return f"{self.learning_rate:g}{more}"


@dataclass(frozen=True, slots=True)
class Tuned(Row[Experiment]):
    """A row, and the settings of which validation samples of seed 0 pick one."""

    settings: tuple[Setting, ...] = ()

    def tried(self, seed: int) -> dict[Setting, Experiment]:
        """Its runs of a seed, by setting."""
        made = self.make(seed)
        return {
            one: replace(made, learning_rate=one.learning_rate, server=one.server)
            for one in self.settings
        }


BASELINE = "all full"


@dataclass(frozen=True, slots=True)
class Line:
    """Name, what it shows, and what is its own of its runs; ``rates`` where other settings are
    tried than the table's."""

    name: str
    shows: str
    fleet: Fleet
    kind: Kind
    slices: Slices = "static"
    whole: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()


def _of_width(line: Line) -> Line:
    return replace(line, kind="widths")


_POOLED = Line("pooled", "all samples in one place, the full model", "pooled", "widths")
_RANKS = (
    Line(BASELINE, "every device trains the full model", "full", "ranks"),
    Line("low rank", "a quarter each at 1/8, 1/4, 1/2 of the rank and whole", "unequal", "ranks"),
    Line("slices", "a quarter each at 1/8, 1/4, 1/2 of the width and whole", "unequal", "widths"),
    Line("all smallest, low rank", "every device at 1/8 of the rank", "smallest", "ranks"),
    Line("all smallest, slices", "every device at 1/8 of the width", "smallest", "widths"),
    Line(
        "only the strong", "the quarter that affords all; parts serve the rest", "strong", "ranks"
    ),
    Line("alone", "nothing exchanged: each device its own rank", "alone", "ranks"),
)
_HYBRID = Line(
    "low rank, convolutions whole", "linear layers factored, FedHM's hybrid", "unequal", "ranks",
    whole=("first", "second"), rates=(0.2, 0.4),
)  # fmt: skip
_MOVED = (
    Line("slices, rolling", "after FedRolex", "unequal", "widths", "rolling"),
    Line("slices, dealt", "at random", "unequal", "widths", "dealt"),
    Line("slices, ranked", "the strongest units, after FIARSE", "unequal", "widths", "ranked"),
    Line("FjORD", "reimplemented, without its distillation", "fjord", "widths"),
)
_OWN_NETWORKS = (
    Line("FedProto", "four networks, mean embeddings by class", "prototypes", "widths"),
    Line("mutual learning", "four networks, soft labels of a tenth", "mutual", "widths"),
)
_LINES: Mapping[Data, tuple[Line, ...]] = {
    "air": (*_RANKS, *_MOVED, _POOLED),
    "clicks": (*_RANKS, *_MOVED, _POOLED),
    "next-item": (
        *(each if each.fleet in ("unequal", "smallest") else _of_width(each) for each in _RANKS),
        *_MOVED,
        _POOLED,
        Line("popularity", "the most watched items, the same for all", "popular", "widths"),
    ),
    "digits": (*_RANKS, _HYBRID, *_MOVED, *_OWN_NETWORKS, _POOLED),
    "fashion": (*_RANKS, _HYBRID, *_MOVED, *_OWN_NETWORKS, _POOLED),
    "lora": (
        _of_width(_RANKS[0]),
        Line("adapters", "a quarter each at the ranks 1, 2, 4 and 8", "unequal", "widths"),
        Line("all smallest", "every device at rank 1", "smallest", "widths"),
        *map(_of_width, _RANKS[-2:]),
        Line("frozen", "the model as it was before", "frozen", "widths"),
        _POOLED,
    ),
}


def _plain(*rates: float) -> tuple[Setting, ...]:
    return tuple(map(Setting, rates))


Shape = tuple[int, int, int, int, int]
"""Rounds, devices, cohort, steps and batch size."""


def _table(
    table: str,
    data: Data,
    shape: Shape,
    settings: tuple[Setting, ...],
    alone: tuple[float, ...],
    skew: float = 1.0,
) -> tuple[Tuned, ...]:
    def row(line: Line) -> Tuned:
        tried = _plain(*line.rates) or settings
        if line.fleet in ("alone", "pooled"):
            tried = _plain(*alone)
        elif line.fleet in ("frozen", "popular"):
            tried = _plain(0)
        elif line.fleet in ("prototypes", "mutual"):
            tried = _plain(*(each.learning_rate for each in settings))
        return Tuned(
            line.name,
            line.shows,
            lambda seed: Experiment(
                seed, data, skew, line.fleet, line.kind, 0.0, 0.0, *shape, line.slices, line.whole
            ),
            table,
            tried,
        )

    return tuple(map(row, _LINES[data]))


TABLES: Mapping[str, str] = {
    "air": "Beijing air, 12 stations, GRU: accuracy of the PM2.5 class in three hours",
    "clicks": "MovieLens 1M clicks, 2,000 users, embeddings: AUC within a user",
    "next-item": "MovieLens 100K, what 943 users watch next, GRU4Rec: HR@10 among all items",
    "digits": "V-MNIST, 18 devices, six variants, CNN: accuracy",
    "fashion-0.3": "Fashion-MNIST, 100 devices, Dirichlet 0.3, CNN: accuracy",
    "fashion-0.1": "Fashion-MNIST, 100 devices, Dirichlet 0.1, CNN: accuracy",
    "lora": "Turned digits, 40 devices, LoRA on a transformer of upright ones: accuracy",
    "levers": "V-MNIST, what was tried on low rank: accuracy on validation samples",
}
_AIR = _table("air", "air", (40, 12, 12, 20, 32), _plain(0.4, 0.8), (0.2, 0.4))
_CLICKS = _table(
    "clicks",
    "clicks",
    (60, 2000, 100, 5, 32),
    (Setting(0.5, 0.03), Setting(2, 0.01), Setting(2, 0.03)),
    (0.1, 0.5, 2),
)
_NEXT_ITEM = _table(
    "next-item",
    "next-item",
    (50, 943, 50, 2, 4),
    (Setting(2, 0.03), Setting(2, 0.1), Setting(0.5, 0.1)),
    (0.5, 2),
)
_DIGITS = _table("digits", "digits", (60, 18, 18, 10, 32), _plain(0.2, 0.4), (0.05, 0.1))

_LORA = _table("lora", "lora", (80, 40, 12, 5, 32), _plain(0.005, 0.01), (0.005, 0.01))


def _fashion(skew: float, *rates: float) -> tuple[Tuned, ...]:
    shape, alone = (60, 100, 20, 10, 32), (0.05, 0.1, 0.2, 0.4)
    return _table(f"fashion-{skew}", "fashion", shape, _plain(*rates), alone, skew)


_FASHION = _fashion(0.3, 0.1, 0.2, 0.4, 0.8) + _fashion(0.1, 0.1, 0.2, 0.4)

_DIGITS_BY_NAME = {row.name: row for row in _DIGITS}


def _lever(name: str, shows: str, *rates: float, of: str = "low rank", **changes: Any) -> Tuned:
    """A row of handwriting with something changed; at the rate that was best there, or others."""
    row = _DIGITS_BY_NAME[of]
    tried = _plain(*(rates or (0.4,)))
    return Tuned(name, shows, lambda seed: replace(row.make(seed), **changes), "levers", tried)


_LEVERS = (
    _lever(BASELINE, "beside them", of=BASELINE),
    _lever("low rank", "as it is in the product"),
    _lever(_HYBRID.name, _HYBRID.shows, of=_HYBRID.name),
    _lever("taught", "smaller rungs learn what the full model says, too", taught=1.0),
    _lever("taught at half the rate", "likewise", taught=1.0, small_rate=0.5),
    _lever("taught softly", "likewise, at a temperature of 3", taught=1.0, temperature=3.0),
    _lever("smaller rungs at 0.6 of the rate", "", small_rate=0.6),
    _lever("60 rounds of 5 steps", "half of the steps", steps=5),
    _lever("120 rounds of 5 steps", "as many steps in all", rounds=120, steps=5),
    _lever("30 rounds of 20 steps", "likewise", 0.2, 0.4, rounds=30, steps=20),
    _lever("15 rounds of 40 steps", "likewise", 0.2, rounds=15, steps=40),
)

ROWS: tuple[Tuned, ...] = (
    *_AIR, *_CLICKS, *_NEXT_ITEM, *_DIGITS, *_FASHION, *_LORA, *_LEVERS
)  # fmt: skip
