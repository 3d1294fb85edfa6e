"""Steps of a trainer on local samples: shuffled minibatches, and nothing changed when one fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.safetensors import Array
from device_sdk.errors import DeviceError, StateError
from device_sdk.local_data import DataSource
from device_sdk.methods.learner import Declined, Learner, LearnerError
from device_sdk.methods.state import State, part, prefixed
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.tensors import LARGEST_VALUE
from device_sdk.wire.publish.report import Reason

# A trainer's state as part of a learner's: named arrays under ``trainer.``.

TRAINER = "trainer."


def trainer_state(trainer: Trainer, prefix: str = TRAINER) -> State:
    """Copies of the state tensors but for frozen ones, which the artifact has: parameters, buffers,
    optimizer and step count."""
    frozen = trainer.artifact.frozen
    return prefixed(prefix, {n: each for n, each in trainer.state.items() if n not in frozen})


def restore_trainer(trainer: Trainer, state: State, prefix: str = TRAINER) -> None:
    """Take :func:`trainer_state` back; raises LearnerError where it does not fit, unchanged."""
    own = set(trainer.artifact.state_by_name) - trainer.artifact.frozen
    wanted = {prefix + name for name in own}
    if set(state) != wanted:
        raise LearnerError(f"the state holds {sorted(state)}; expected {sorted(wanted)}")
    try:
        trainer.set_state(part(prefix, state))
    except StateError as error:
        raise LearnerError(f"the state does not fit the artifact: {error}") from error


def forget_momenta(trainer: Trainer) -> None:
    """Optimizer state at zero, and the step count with it: bias corrections start anew."""
    kinds = {tensor.name: tensor.kind for tensor in trainer.artifact.state}
    fresh = {
        name: np.zeros_like(array)
        for name, array in trainer.state.items()
        if kinds[name] in ("optimizer", "counter")
    }
    trainer.set_state(fresh)


Samples = Mapping[str, NDArray[Any]]
Batch = dict[str, NDArray[Any]]

LABEL = "label"
"""The entry that says what a sample is, for methods that tell of each label."""


def labelled_samples(given: Samples, inputs: Collection[str], classes: int) -> Batch:
    """What of the local arrays the artifact's ``inputs`` read, ``label`` int64 [samples] among it;
    the rest is left aside, so that the same data suit unequal models. Nothing where there is none.

    Raises LearnerError where the labels are missing, or not from 0 to ``classes`` - 1.
    """
    samples = {name: array for name, array in given.items() if name in inputs}
    if not given:
        return samples
    label = samples.get(LABEL)
    if label is None or label.dtype != np.int64 or label.ndim != 1:
        found = "missing" if label is None else f"{label.dtype} {label.shape}"
        raise LearnerError(
            f"the local {LABEL!r} is {found}; expected int64 [samples]", Reason.BAD_DATA
        )
    if len(label) and not 0 <= int(label.min()) <= int(label.max()) < classes:
        raise LearnerError(
            f"local labels reach from {label.min()} to {label.max()}, not below "
            f"the task's {classes} classes",
            Reason.BAD_DATA,
        )
    return samples


def least_rows(trainer: Trainer, entries: Collection[str], samples: int, batch_size: int) -> int:
    """The fewest rows of a batch to train on, whose ``entries`` are cut into rows.

    Raises :class:`Declined` where the device has too few samples for one such batch, LearnerError
    where the task's batches are too small, whatever a device has.
    """
    least, fixed = trainer.artifact.rows(entries, to_train=True)
    if 0 < samples < least:
        raise too_few_samples(samples, least)
    if batch_size < least or (fixed and batch_size > least):
        raise LearnerError(
            f"the task's batches are of {batch_size} samples, and a step of "
            f"{trainer.artifact.name!r} takes {'exactly' if fixed else 'at least'} {least}"
        )
    return least


def too_few_samples(samples: int, needed: int) -> Declined:
    """Why a device with data takes no part."""
    return Declined(
        f"this device has {samples} sample{'s' * (samples != 1)} to train on; the task's model "
        f"needs at least {needed}",
        Reason.TOO_FEW_SAMPLES,
    )


@dataclass(frozen=True, slots=True)
class StepsReport:
    """What some steps came to: their number, the samples they saw, and the mean loss a sample.

    ``loss`` is NaN where there was no step.
    """

    steps: int = 0
    samples: int = 0
    loss: float = math.nan

    def __add__(self, other: StepsReport) -> StepsReport:
        samples = self.samples + other.samples
        total = sum(one.loss * one.samples for one in (self, other) if one.samples)
        return StepsReport(
            self.steps + other.steps, samples, total / samples if samples else math.nan
        )


class ModelLearner(Learner):
    """A learner whose state is that of the trainer of this device's own model.

    Args:
        data: the device's samples, asked for at the start of each round.
        trainer: of the task's artifact. Between rounds it holds this device's model.
        sender: the device's name among the task's, 32 hexadecimal digits.
        rng: orders the samples.
    """

    def __init__(
        self, data: DataSource, trainer: Trainer, sender: str, rng: np.random.Generator
    ) -> None:
        self._data, self._trainer = data, trainer
        self._sender, self._rng = sender, rng
        self.report = StepsReport()
        """Steps, samples and mean loss of the last round, of a method that notes them."""

    @property
    def trainer(self) -> Trainer:
        """The device's model."""
        return self._trainer

    def state(self) -> State:
        """The trainer's state tensors, as ``trainer.*``."""
        return trainer_state(self._trainer)

    def restore(self, state: State) -> None:
        """Take ``state()`` back; raises LearnerError where names, dtypes or shapes do not fit."""
        restore_trainer(self._trainer, state)


@contextmanager
def unchanged_on_error(trainer: Trainer) -> Iterator[None]:
    """Give the trainer its state back when the block fails.

    The trainer's own errors (a batch that does not fit, a loss that is not finite) leave as
    LearnerError, which is what ``Learner.train`` may raise; others leave as they are.
    """
    before = trainer.state
    try:
        yield
    except DeviceError as error:
        trainer.set_state(before)
        raise LearnerError(f"training failed: {error}") from error
    except BaseException:
        trainer.set_state(before)
        raise


def epoch_batches(
    samples: Samples, batch_size: int, epochs: int, rng: np.random.Generator, least: int = 1
) -> Iterator[Batch]:
    """Minibatches of ``epochs`` passes, each in a fresh order; a pass's last one may be shorter.

    Where fewer than ``least`` samples remain (``Manifest.rows``), the pass leaves them out;
    other passes have others. Nothing where there are no samples. Raises ValueError for a batch
    size below 1 or epochs below 0.
    """
    _require_counts(batch_size, epochs)
    count = _length(samples)
    for _ in range(epochs):
        order = rng.permutation(count)
        for start in range(0, count, batch_size):
            rows = order[start : start + batch_size]
            if start == 0 or len(rows) >= least:
                yield _rows(samples, rows)


class SampleStream:
    """Minibatches without end, all of one size: each pass over the samples in a fresh order.

    A batch may hold the end of one pass and the start of the next; one of at least as many
    samples as there are holds each of them once. Raises ValueError where there are no samples or
    the size is below 1.
    """

    def __init__(self, samples: Samples, batch_size: int, rng: np.random.Generator) -> None:
        _require_counts(batch_size, 0)
        self._samples = samples
        self._count = _length(samples)
        if self._count == 0:
            raise ValueError("no samples to draw batches from")
        self._size = min(batch_size, self._count)
        self._rng = rng
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def draw(self) -> Batch:
        """The next batch: for each array [size, ...], fresh and contiguous."""
        chosen = self._order[: self._size]
        self._order = self._order[self._size :]
        missing = self._size - len(chosen)
        if missing:
            order = self._rng.permutation(self._count)
            # What this batch holds already comes later in the new pass: no sample twice in a batch.
            held = np.isin(order, chosen)
            order = np.concatenate([order[~held], order[held]])
            chosen = np.concatenate([chosen, order[:missing]])
            self._order = order[missing:]
        return _rows(self._samples, chosen)


@dataclass(frozen=True, slots=True)
class Epochs:
    """How often the samples are gone through, and in batches of how many; it ends after
    ``most_steps``, 0 for no limit."""

    batch_size: int
    epochs: int
    most_steps: int = 0


class EachStep:
    """What goes with each of some steps.

    Attributes:
        hyper: replaces the artifact's defaults in these steps.
        extra: batch inputs that are the same for each step, not cut into rows.
        after: called after each step, with its batch.
    """

    def __init__(
        self,
        hyper: Mapping[str, float] | None = None,
        extra: Mapping[str, Array] | None = None,
        after: Callable[[Batch], None] | None = None,
    ) -> None:
        self.hyper, self.extra, self.after = hyper, extra, after


def train_epochs(
    trainer: Trainer,
    samples: Samples,
    passes: Epochs,
    rng: np.random.Generator,
    each: EachStep | None = None,
) -> StepsReport:
    """Train on shuffled minibatches of ``samples``: arrays by the names of the artifact's batch
    inputs, a row for each sample.

    Raises what :func:`least_rows` and ``Trainer.step`` do; use :func:`unchanged_on_error` around
    whatever must be undone then.
    """
    each, size = each or EachStep(), passes.batch_size
    steps, seen, total = 0, 0, 0.0
    least = least_rows(trainer, samples.keys(), _length(samples), size)
    for batch in epoch_batches(samples, size, passes.epochs, rng, least):
        rows = _length(batch)
        batch.update(each.extra or {})
        total += trainer.step(batch, hyper=each.hyper) * rows
        steps, seen = steps + 1, seen + rows
        if each.after is not None:
            each.after(batch)
        if steps == passes.most_steps:
            break
    return StepsReport(steps, seen, sayable(total / seen) if seen else math.nan)


def sayable(loss: float) -> float:
    """The mean loss of a round's steps, as it may be told to the aggregator, which takes none above
    1e12. Raises LearnerError for a larger one: what led there is no model."""
    # NaN fails the comparison.
    if not abs(loss) <= LARGEST_VALUE:
        raise LearnerError(
            f"the mean loss of the round's steps is {loss:.3g}: look at the scale of the data, and "
            "lower the learning rate",
            Reason.NOT_FINITE,
        )
    return loss


def predict_all(
    trainer: Trainer, samples: Samples, output: str, *, batch_size: int = 256
) -> NDArray[np.float32]:
    """The artifact's output ``output`` for all samples, [samples, ...], in batches.

    Raises ValueError where there are no samples, LearnerError where the artifact has no such
    output, and what ``Trainer.predict`` does.
    """
    _require_counts(batch_size, 0)
    count = _length(samples)
    if count == 0:
        raise ValueError("no samples to predict")
    least, _ = trainer.artifact.rows(samples.keys())
    parts = []
    for start in range(0, count, batch_size):
        end = min(start + batch_size, count)
        begin = max(0, min(start, end - least))  # with rows of before where too few remain
        found = trainer.predict(_rows(samples, np.arange(begin, end)))
        if output not in found:
            raise LearnerError(
                f"the artifact predicts {', '.join(sorted(found))}, but {output!r} is needed: "
                "export it with a predict= that returns it"
            )
        parts.append(found[output][start - begin :])
    return np.concatenate(parts)


def _length(samples: Samples) -> int:
    return len(next(iter(samples.values()))) if samples else 0


def _rows(samples: Samples, rows: NDArray[np.int64]) -> Batch:
    return {name: array[rows] for name, array in samples.items()}


def _require_counts(batch_size: int, epochs: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected at least 1")
    if epochs < 0:
        raise ValueError(f"epochs is {epochs}; expected 0 or more")


# The proximal term: a pull of half of mu times the squared distance to where a round started (Li
# et al. 2020, Federated optimization in heterogeneous networks, eq. 2).

_ANCHOR = "anchor."
_MU = "mu"


def anchor_names(trainer: Trainer) -> dict[str, str]:
    """Parameter to buffer, for artifacts exported with the term inside: buffer ``anchor.<name>``
    holds the parameter's value at the start of the round, and ``mu`` is an entry of the batch."""
    entries = {port.of for port in trainer.artifact.graphs["train"].select("batch")}
    buffers = trainer.buffers
    found = {name: _ANCHOR + name for name in trainer.parameters if _ANCHOR + name in buffers}
    return found if _MU in entries else {}


class ProximalTerm(EachStep):
    """Prepares a round's steps from the trainer's present parameters.

    Where the artifact has the term inside its graph, the parameters become its anchors. Elsewhere
    each step is followed by the term's exact proximal step, w <- (w + lr mu a) / (1 + lr mu): what
    the term does to plain SGD up to lr squared, and apart from the moments of other optimizers, as
    decoupled weight decay is.

    Args:
        learning_rate: of the round; 0 for the artifact's own.

    Raises LearnerError where a rate is needed and the artifact has none.
    """

    def __init__(self, trainer: Trainer, mu: float, learning_rate: float) -> None:
        known = trainer.hyper
        if learning_rate and "lr" not in known:
            raise LearnerError("the task sets a learning rate, but the artifact has no input 'lr'")
        super().__init__({"lr": learning_rate} if learning_rate else None)
        anchors = anchor_names(trainer)
        self._trainer = trainer
        self._start: dict[str, Array] = {}
        self._pull = 0.0
        if anchors:
            self.extra = {_MU: np.asarray(mu, dtype=np.float32)}
            parameters = trainer.parameters
            trainer.set_parameters({anchor: parameters[name] for name, anchor in anchors.items()})
        elif mu:
            rate = learning_rate or known.get("lr", 0.0)
            if rate <= 0:
                raise LearnerError(
                    "a proximal term needs a learning rate: export the artifact with an optimizer "
                    "that has one, or with the term inside"
                )
            self._pull = rate * mu
            self._start = trainer.parameters
            self.after = self._pull_back

    def _pull_back(self, _: Batch) -> None:
        # 1 / (1 + p) of the way stays: the minimiser of |v - w|^2 / 2 + p |v - a|^2 / 2.
        weight = np.float32(1 / (1 + self._pull))
        now = self._trainer.parameters
        self._trainer.set_parameters(
            {name: start + weight * (now[name] - start) for name, start in self._start.items()}
        )
