"""What a device's own model comes to in a round, beside the model that all devices share.

A choice of ``FedAvgTraining.personalise`` is a function from what a round begins with to what it
ends with. What is sent is the same in all of them, how far training led the shared model: to the
aggregator each is plain federated averaging.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.parts import is_under
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.contract import FedAvgTraining, Personalise
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.local_steps import (
    Batch,
    EachStep,
    Epochs,
    ProximalTerm,
    StepsReport,
    epoch_batches,
    forget_momenta,
    least_rows,
    train_epochs,
)
from device_sdk.methods.state import State
from device_sdk.trainer import Trainer
from device_sdk.wire.publish.report import Reason

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """What a round begins with.

    Attributes:
        trainer: holds the broadcast's model.
        training: the broadcast's settings.
        data: the device's samples.
        rng: orders them.
        shared: torch's names of the parameters that travel.
        own: the device's own model as the last round left it, parameters and buffers by torch's
            names; None for a device that has none yet.
        kept: what the same choice left beside it in an earlier round.
    """

    trainer: Trainer
    training: FedAvgTraining
    data: LocalData
    rng: np.random.Generator
    shared: tuple[str, ...]
    own: Arrays | None = None
    kept: State = field(default_factory=dict)

    def towards_present(self, mu: float) -> ProximalTerm:
        """What goes with steps that are pulled towards the model that the trainer now holds."""
        return ProximalTerm(self.trainer, mu, self.training.learning_rate)

    def steps(self, each: EachStep) -> StepsReport:
        """A round's steps from the model that the trainer holds."""
        if self.data.samples == 0:
            raise LearnerError("there are no local samples to train on", Reason.NO_DATA)
        training = self.training
        if training.optimizer_state == "fresh":
            forget_momenta(self.trainer)
        size = training.batch_size or self.data.samples
        passes = Epochs(size, training.epochs, training.most_steps)
        return train_epochs(self.trainer, self.data.train, passes, self.rng, each)


@dataclass(frozen=True, slots=True, eq=False)
class Ending:
    """What a round ends with; the trainer holds the device's own model.

    Attributes:
        report: of the shared model's steps.
        trained: the shared model after them, parameters and buffers by torch's names.
        kept: what the next round is given back: float32 arrays.
    """

    report: StepsReport
    trained: Arrays
    kept: State = field(default_factory=dict)


def model_of(trainer: Trainer) -> Arrays:
    """Copies of the parameters and buffers that steps may move, by torch's names."""
    still = trainer.artifact.frozen_members
    everything = {**trainer.parameters, **trainer.buffers}
    return {name: array for name, array in everything.items() if name not in still}


def fine_tuned(begin: Beginning) -> Ending:
    """The broadcast's model, trained on: what is sent and what is kept are the same (McMahan et al.
    2017, algorithm 1, with its clients' w)."""
    report = begin.steps(begin.towards_present(begin.training.proximal_mu))
    return Ending(report, model_of(begin.trainer))


def ditto(begin: Beginning) -> Ending:
    """Ditto (Li et al. 2021, Ditto: fair and robust federated learning through personalization,
    algorithm 1): beside the shared model w a model v of the device's own takes as many steps of

        v <- v - lr (grad F(v) + lambda (v - w))

    with w as it arrived. v begins as the first w that arrived. Twice the work of a round.
    """
    own = model_of(begin.trainer) if begin.own is None else begin.own
    pull = begin.towards_present(begin.training.own_pull)
    ending = fine_tuned(begin)
    begin.trainer.set_parameters(own)
    begin.steps(pull)
    return ending


def ala(begin: Beginning) -> Ending:
    """FedALA (Zhang et al. 2023, FedALA: adaptive local aggregation for personalized federated
    learning, section 3.3, eq. 4 to 6): the shared steps begin with

        v + (w - v) * W

    element by element, of the device's last model v and the model w that arrived. W, from 1 at
    first and within 0 to 1, takes a step along its own gradient, grad F * (w - v), on each batch of
    some of the samples. What is not mixed is w's.

    Left out is that W is trained until it no longer changes when it is first used, which may take
    as long as ten rounds: each round trains it for one pass.
    """
    if begin.own is None:
        return fine_tuned(begin)
    trainer, training, own = begin.trainer, begin.training, begin.own
    arrived = model_of(trainer)
    under = training.mixed_names
    names = [name for name in begin.shared if not under or is_under(name, under)]
    apart = {name: arrived[name] - own[name] for name in names}
    ones = {name: np.ones_like(array) for name, array in apart.items()}
    weights = _as_kept(begin.kept, ones)

    def mixture() -> Arrays:
        return arrived | {name: own[name] + apart[name] * weights[name] for name in names}

    samples, size = begin.data.train, training.batch_size or begin.data.samples
    least = least_rows(trainer, samples.keys(), begin.data.samples, size)
    count = max(least, round(training.mixing_samples * begin.data.samples))
    some = begin.rng.choice(begin.data.samples, min(count, begin.data.samples), replace=False)
    chosen = {name: array[some] for name, array in samples.items()}
    start = mixture()
    trainer.set_parameters(start)
    for batch in epoch_batches(chosen, size, 1, begin.rng, least):
        trainer.step(batch, hyper={"lr": 1.0})  # so that it moves by the gradient
        stepped = trainer.parameters
        for name in names:
            gradient = start[name] - stepped[name]
            moved = weights[name] - np.float32(training.mixing_rate) * gradient * apart[name]
            weights[name] = np.clip(moved, 0, 1)
        start = mixture()
        trainer.set_parameters(start)
    return replace(fine_tuned(begin), kept=weights)


_SHARE: Final = "own_share"


def apfl(begin: Beginning) -> Ending:
    """APFL (Deng et al. 2020, Adaptive personalized federated learning, algorithm 1 and eq. 10):
    each step on a batch is one of the shared model w, and one of the device's own v, at the mixture

        m = alpha v + (1 - alpha) w;   v <- v - lr alpha grad F(m)

    and, where alpha adapts, alpha <- alpha - lr <v - w, grad F(m)>, within 0 and 1. The device's
    own model is m; v is kept beside it. Buffers are m's own. Twice the work of a round.
    """
    trainer, training, shared = begin.trainer, begin.training, begin.shared
    arrived = model_of(trainer)
    first = arrived if begin.own is None else begin.own
    v = _as_kept(begin.kept, {name: first[name] for name in shared})
    alpha = float(begin.kept.get(_SHARE, training.own_share))
    w = {name: arrived[name] for name in shared}

    def mixed() -> Arrays:
        return {name: np.float32(alpha) * (v[name] - w[name]) + w[name] for name in shared}

    own = first | mixed()

    def after(batch: Batch) -> None:
        nonlocal alpha, w, own
        stepped = model_of(trainer)
        trainer.set_parameters(own)
        trainer.step(batch, hyper=each.hyper)
        found = model_of(trainer)
        # By - lr grad F(m), of an optimizer without momenta.
        moved = {name: found[name] - own[name] for name in shared}
        along = sum(float(np.vdot(v[name] - w[name], moved[name])) for name in shared)
        for name in shared:
            v[name] += np.float32(alpha) * moved[name]
        if training.own_share_adapts:
            alpha = min(max(alpha + along, 0.0), 1.0)
        w = {name: stepped[name] for name in shared}
        own = found | mixed()
        trainer.set_parameters(stepped)

    each = begin.towards_present(0)
    each.after = after
    report = begin.steps(each)
    trained = model_of(trainer)
    trainer.set_parameters(own)
    return Ending(report, trained, {**v, _SHARE: np.asarray(alpha, np.float32)})


def _as_kept(kept: State, first: Mapping[str, NDArray[Any]]) -> Arrays:
    """What was kept under the names of ``first``; ``first`` where it is not all there."""
    there = all(name in kept and kept[name].shape == a.shape for name, a in first.items())
    return {name: np.array(kept[name] if there else array) for name, array in first.items()}


CHOICES: Mapping[Personalise, Callable[[Beginning], Ending]] = {
    "fine-tuned": fine_tuned,
    "ditto": ditto,
    "ala": ala,
    "apfl": apfl,
}
