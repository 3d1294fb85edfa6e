"""A run as data, what it finds, and the rows with the settings that are tried for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from benchmarks.harness import Row

Method = Literal["alone", "fine-tuned", "ditto", "ala", "apfl", "fedper", "prototypes", "attention"]
Model = Literal["own", "shared"]

ROUNDS, EVERY, BATCH = 20, 5, 10
DEVICES = 20


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run over PFLlib's split, one local epoch of batches of ten on every device a round.

    Attributes:
        seed: of the first values and of the samples' order; the split is the same.
        method: what devices exchange, and what their own model is.
        learning_rate: of the devices' SGD.
        strength: what the method has beside it: ``own_pull`` of Ditto, ``mixing_rate`` of FedALA,
            ``own_share`` of APFL, ``pull`` of FedProto, FedAMP's ``amp_sigma``.
    """

    seed: int
    method: Method
    learning_rate: float
    strength: float = 0.0
    rounds: int = ROUNDS


@dataclass(frozen=True, slots=True)
class Judged:
    """Of a kind of model at the round that validation picks: accuracy over all devices' held
    pictures together (as PFLlib counts), the mean over the devices, and each device's.

    ``curve``: accuracy on validation pictures after each evaluated round.
    """

    round: int
    validation: float
    test: float
    mean: float
    by_device: list[float] = field(default_factory=list)
    curve: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the devices' own models are worth, and where there is one the shared one.

    ``up_bytes``, ``down_bytes``: of a device in a round, as encoded in float16. ``milliseconds``:
    processor time of a device's round, its share of the aggregator's included.
    """

    judged: dict[str, Judged]
    up_bytes: float
    down_bytes: float
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What is tried for a row; see :class:`Experiment`."""

    learning_rate: float
    strength: float = 0.0

    def __str__(self) -> str:
        return f"{self.learning_rate:g}" + (f", {self.strength:g}" if self.strength else "")


@dataclass(frozen=True, slots=True)
class Tuned(Row[Experiment]):
    """A row, which of its run's models it shows, and the settings of which validation pictures of
    seed 0 pick one."""

    model: Model = "own"
    settings: tuple[Setting, ...] = ()

    def tried(self, seed: int) -> dict[Setting, Experiment]:
        """Its runs of a seed, by setting."""
        made = self.make(seed)
        return {
            one: replace(made, learning_rate=one.learning_rate, strength=one.strength)
            for one in self.settings
        }


def _settings(rates: tuple[float, ...], strengths: tuple[float, ...]) -> tuple[Setting, ...]:
    return tuple(Setting(rate, strength) for rate in rates for strength in strengths or (0.0,))


def _row(
    name: str,
    shows: str,
    method: Method,
    rates: tuple[float, ...],
    strengths: tuple[float, ...] = (),
    model: Model = "own",
) -> Tuned:
    settings = _settings(rates, strengths)
    return Tuned(name, shows, lambda seed: Experiment(seed, method, 0.0), "", model, settings)


ALONE, USUAL = "alone", "fine-tuned"
_RATES = (0.01, 0.03, 0.1)
ROWS: tuple[Tuned, ...] = (
    _row(ALONE, "nothing is exchanged", "alone", _RATES),
    _row("global", "federated averaging's model", "fine-tuned", _RATES, (), "shared"),
    _row(USUAL, "the same, trained on by each device", "fine-tuned", _RATES),
    _row("Ditto", "an own model, pulled towards the shared one", "ditto", _RATES[1:], (0.1, 1.0)),
    _row("FedALA", "own and shared mixed by element, then trained", "ala", _RATES[1:], (1.0, 10.0)),
    _row("APFL", "a mixture of an own model and the shared one", "apfl", _RATES[2:], (0.25, 0.75)),
    _row("FedPer", "the last layer stays on the device", "fedper", _RATES[2:]),
    _row("FedProto", "mean embeddings by class", "prototypes", _RATES[2:], (1.0,)),
    _row("FedAMP", "mixtures made by the aggregator", "attention", _RATES[2:], (0.2,)),
)

PRINTED: Mapping[str, float] = {
    "global": 0.8585,
    "Ditto": 0.9747,
    "FedALA": 0.9766,
    "FedAMP": 0.9720,
}
"""Accuracies that PFLlib's authors print of the same split (Zhang et al. 2023), after up to 2,000
rounds of a network 28 times as large."""
