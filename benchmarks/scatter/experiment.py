"""One measured run, as data: what it does, what it found, and the key that it is stored under."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from aggregator.methods.scatter import ScatterSettings
from benchmarks.channels import BroadcastCodec, UpdateCodec
from benchmarks.harness import key_of
from device_sdk.methods.scatter.triples import PoolSettings

METHOD_REVISION = 2
"""Part of every key. Raise it when the code of learners, methods or codecs changes what a run finds
or measures: outcomes of other revisions are then no longer taken for current ones.

1: first measured runs. 2: pseudo-items share the true triples' negatives; updates really sealed.
"""

_OFF = {
    "clip_multiple": 0.0,
    "row_multiple": 0.0,
    "outlier_multiple": 0.0,
    "item_multiple": 0.0,
    "robust": "none",
    "trim_share": 0.1,
}
_OF_LEAST_SQUARES = ("loss", "least_squares")

_PLAIN_BROADCASTS = "float16"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run of scatter aggregation over one virtual device a user.

    Attributes:
        data: ``ml-100k`` or ``ml-1m``.
        split: ``test``, trained on all training items; or ``validation``, which holds one of them
            out and is the only one that settings may be chosen on.
        seed: of the whole run. Runs that share it share fleet classes, cohorts and first matrices
            as far as their shapes allow, which is what makes differences paired.
        width: K.
        classes: k_i of the capacity classes, in equal shares.
        epochs: full passes over the fleet.
        cohort: devices a round; 0 for all.
        spread: standard deviation of the first item matrix.
        codec: how updates travel; ``direct`` hands arrays over, broadcasts' too.
        broadcast_codec: how broadcasts travel. Other than float16, devices are also evaluated with
            what they received.
        every: epochs between evaluations. What a run of test items shows on its way says how soon
            it is there, and chooses nothing.
    """

    data: str
    split: Literal["test", "validation"]
    seed: int
    width: int
    classes: tuple[int, ...]
    epochs: int
    cohort: int = 256
    spread: float = 0.01
    codec: UpdateCodec = "direct"
    every: int = 10
    settings: ScatterSettings = field(default_factory=ScatterSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    broadcast_codec: BroadcastCodec = "float16"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.width < 1 or not self.classes or self.every < 1:
            raise ValueError("an experiment needs epochs, columns and at least one capacity class")
        if self.codec == "direct" and self.broadcast_codec != _PLAIN_BROADCASTS:
            raise ValueError(
                f"broadcast_codec is {self.broadcast_codec!r} and codec 'direct', which encodes "
                "nothing; expected a codec for updates such as 'int8'"
            )

    @property
    def key(self) -> str:
        """Names the stored result: another setting, another key."""
        described = asdict(self)
        # Options that came later keep the keys of runs from before, where they are off.
        for name, off in _OFF.items():
            if described["settings"][name] == off:
                del described["settings"][name]
        if self.settings.loss == "bpr":
            for name in _OF_LEAST_SQUARES:
                del described["settings"][name]
        if self.broadcast_codec == _PLAIN_BROADCASTS:
            del described["broadcast_codec"]
        return key_of({"revision": METHOD_REVISION, **described})


@dataclass(frozen=True, slots=True)
class Point:
    """Quality after so many rounds: among all items, and of 99 negatives."""

    rounds: int
    full_hit_ratio: float
    full_ndcg: float
    hit_ratio: float
    ndcg: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Quality over the run and what it cost.

    ``share`` is that of the devices in a round; ``by_class`` NDCG@10 among all items by k_i at the
    end; ``update_bytes`` the mean sealed size of an update (0 where the updates were handed over
    unencoded); ``device_seconds`` the processor time of a device's round; ``round_seconds`` the
    wall-clock time of a round of all, which is simulated.
    """

    curve: tuple[Point, ...]
    share: float
    by_class: dict[str, float]
    update_rows: float
    update_bytes: float
    device_seconds: float
    round_seconds: float

    @property
    def last(self) -> Point:
        """Quality at the end."""
        return self.curve[-1]

    @property
    def enough(self) -> Point:
        """The first with 95 % of the quality at the end, by NDCG@10 among all items."""
        return next(at for at in self.curve if at.full_ndcg >= 0.95 * self.last.full_ndcg)
