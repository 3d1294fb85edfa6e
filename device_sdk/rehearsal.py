"""What a fleet will bring, rehearsed before the first round: made-up data of every kind that
devices are known for, and what became of each in plain sentences.

Whoever has the two halves of a method trains with it (``aggregator/simulate/rehearsal.py``); this
module's own process trains an artifact alone, as it comes from its author.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.manifest import Manifest
from device_sdk.artifact.parts import DTYPES, Port, axes_of, resolve
from device_sdk.local_data import LocalData
from device_sdk.system.printable import in_words
from device_sdk.trial import PASSED, TrialLimits, Untried, begin, end, say, supervised
from device_sdk.wire.publish.report import Reason

Outcome = Literal["trains", "declines", "fails", "refused"]

_PRESSURE, _SPREAD = 101_325.0, 700.0
_CLOCK, _DAY = 1.7e9, 86_400.0
_NO_CLASS: Final = -100
"""What torch's losses ignore."""
_PUBLIC_ROWS = 8
_ENTRIES_TRIED = 4
"""Inputs of whole numbers whose range is looked for; labels always."""
_NUMBERS_BEYOND = 1 << 20
"""No range is looked for above it."""
_RISES = 100.0
"""A loss that rises by so much in a few steps does not come back."""
_TRUE_SAMPLES = "true samples (tessera-aggregator task check --data)"
MORE_TIMES: Final = 10
"""So many times the usual training is gone on with where no parameter has moved: some optimizers
gather several steps, and some rates begin at 0."""


@dataclass(frozen=True, slots=True)
class Case:
    """A device as there will be some.

    Attributes:
        title: what it brings, after "a device with".
        data: made up: a LocalData, or ids of items.
        usual: every fleet consists of such devices: where one of them fails, no round succeeds.
        advice: what to do where it fails.
    """

    title: str
    data: Any
    usual: bool = False
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a case. ``reason``: a slug of a device or of the aggregator, or a few words
    where there is none; ``detail``: in words; ``progress``: what training came to, where that is
    known."""

    case: Case
    outcome: Outcome
    reason: str = ""
    detail: str = ""
    progress: LossProgress | None = None


@dataclass(frozen=True, slots=True)
class LossProgress:
    """What the steps of a training came to.

    Attributes:
        steps: their number.
        first, last: the loss of the first step's samples before and after them.
        moved: whether any parameter has changed.
    """

    steps: int
    first: float
    last: float
    moved: bool

    def finding(self, case: Case) -> Finding:
        """Of a case in which nothing failed by itself. A model that learns from no samples is at
        fault; one that learns nothing from odd samples is not."""
        if self.last > _RISES * max(abs(self.first), 1.0):
            detail = (
                f"the loss of the same samples rose from {self.first:.3g} to {self.last:.3g} in "
                f"{self._when}, and will go on: is the learning rate too high?"
            )
            return Finding(case, "fails", "not-finite", detail, self)
        if case.usual and not self.moved:
            why = (
                "is the learning rate 0, is everything frozen, or does the loss not depend on what "
                "is trained?"
            )
            detail = f"no parameter moves in {self._when}: {why}"
            return Finding(case, "fails", "", detail, self)
        if case.usual and self.first == self.last and self.steps > 1:
            detail = (
                f"the loss of the same samples is {self.first:.3g} to the last bit before and "
                f"after {self._when}, though parameters move: does it not depend on them?"
            )
            return Finding(case, "fails", "", detail, self)
        return Finding(case, "trains", "" if self.moved else "and changes nothing", "", self)

    def __str__(self) -> str:
        """For people: whether the loss goes down."""
        first, last = f"{self.first:.4g}", f"{self.last:.4g}"
        numbers = f"{first} before, {last} after {self._when}"
        if first == last:
            numbers = f"{first} before and after {self._when}"
            return f"the loss hardly changes: {numbers}; a warm-up, or too small a learning rate?"
        if self.last < self.first:
            return f"the loss goes down: {numbers}"
        # Made-up labels follow from nothing, and dropout and drawn negatives are other ones.
        if self.last > self.first + 0.5 * max(abs(self.first), 1.0):
            return f"the loss rises: {numbers}; try a smaller learning rate, or {_TRUE_SAMPLES}"
        return (
            f"the loss does not go down: {numbers}; made-up labels follow from nothing, so that "
            f"need be no fault: try {_TRUE_SAMPLES}"
        )

    @property
    def _when(self) -> str:
        return f"{self.steps} step{'s' * (self.steps != 1)}"


# Made-up data.


def sample_entries(manifest: Manifest) -> tuple[Port, ...]:
    """The batch entries that are cut into rows, a row for each sample: those whose first axis is
    that of what the model predicts from, else the one that most entries have."""
    train = [port for port in manifest.graphs["train"].select("batch") if port.shape]
    infer = manifest.graphs.get("infer")
    read = [port for port in infer.select("batch") if port.shape] if infer is not None else []
    axes = Counter(port.shape[0] for port in read or train)
    if not axes:
        return ()
    ((axis, _),) = axes.most_common(1)
    return tuple(port for port in train if port.shape[0] == axis)


def rows_of_example(manifest: Manifest) -> int:
    """Rows of the example batch; 1 where nothing is cut into rows."""
    first = [port.shape[0] for port in sample_entries(manifest)][:1]
    return max(1, *resolve(tuple(first), manifest.example_sizes), 1)


def label_entries(manifest: Manifest) -> frozenset[str]:
    """Those that training reads and prediction does not."""
    infer = manifest.graphs.get("infer")
    read = {port.of for port in infer.select("batch")} if infer is not None else set()
    targets = {each.target for each in manifest.metrics.values() if each.target is not None}
    entries = {port.of for port in sample_entries(manifest)}
    return frozenset((entries - read if read else set()) | (targets & entries))


Samples = Mapping[str, NDArray[Any]]
Make = Callable[[int], Samples]
"""Gives so many samples."""
Trains = Callable[[Case], Finding]


def made_up(manifest: Manifest, rng: np.random.Generator) -> tuple[Make, ...]:
    """Ways to make samples up, of which a model takes one or the other: inputs of a normal
    distribution, or between 0 and 1 (a model may take logarithms); labels and ids 0 and 1, 0 alone,
    or 1 and 2 (stars are counted from 1); bytes of any value."""
    return _made_up(manifest, rng, sample_entries(manifest))


def made_up_batches(manifest: Manifest, rng: np.random.Generator) -> tuple[Make, ...]:
    """Likewise ways to make whole batches up for the train graph; what is not cut into rows, and a
    task's method gives, is of the sizes of its export."""
    return _made_up(manifest, rng, manifest.graphs["train"].select("batch"))


def _made_up(
    manifest: Manifest, rng: np.random.Generator, ports: Sequence[Port]
) -> tuple[Make, ...]:
    labels = label_entries(manifest)
    samples = sample_entries(manifest)

    def way(below_zero: bool, numbers: range) -> Make:
        def make(rows: int) -> Samples:
            sizes = dict(manifest.example_sizes)
            sizes.update({axis: rows for port in samples for axis in axes_of(port.shape[:1])})
            return {port.of: drawn(port, shape_of(port, rows, sizes)) for port in ports}

        def shape_of(port: Port, rows: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
            if port in samples:
                return (rows, *resolve(port.shape[1:], sizes))
            return resolve(port.shape, sizes)

        def drawn(port: Port, shape: tuple[int, ...]) -> NDArray[Any]:
            dtype, is_label = DTYPES[port.dtype], port.of in labels
            if dtype.kind == "f" and not is_label:
                values = rng.standard_normal(shape) if below_zero else rng.random(shape)
                return np.asarray(values, dtype)
            among = range(256) if dtype == np.uint8 and not is_label else numbers
            return np.asarray(rng.integers(among.start, among.stop, shape), dtype)

        return make

    return way(True, range(2)), way(False, range(2)), way(False, range(1)), way(False, range(1, 3))


def usual_samples(batch_size: int) -> int:
    """Of a device as most are."""
    return max(2 * batch_size, 16)


def cases(
    manifest: Manifest, batch_size: int, rng: np.random.Generator, draw: Make
) -> tuple[Case, ...]:
    """What to rehearse, the most usual first. ``batch_size``: of the task's steps."""
    public = dict(draw(_PUBLIC_ROWS))

    def device(samples: Samples) -> LocalData:
        return LocalData(samples, public)

    usual = usual_samples(batch_size)
    found = [
        Case(f"{usual} samples", device(draw(usual)), usual=True),
        Case(
            f"{batch_size + 1} samples (a batch and one)",
            device(draw(batch_size + 1)),
            usual=True,
            advice="export the model again: its artifact then says how many samples a step needs",
        ),
    ]
    found += [
        Case(
            f"{rows} sample{'s' * (rows > 1)}",
            device(draw(rows)),
            advice="let the app give no data (an empty LocalData) until there are more",
        )
        for rows in (1, 2)
        if rows <= batch_size
    ]
    labels = label_entries(manifest)
    dtypes = {port.of: DTYPES[port.dtype] for port in sample_entries(manifest)}
    inputs = [each for each, dtype in dtypes.items() if each not in labels and dtype == np.float32]

    def of(
        title: str, names: Iterable[str], put: Callable[[NDArray[Any]], None], advice: str
    ) -> None:
        samples = {each: array.copy() for each, array in draw(usual).items()}
        for each in names:
            put(samples[each])
        found.append(Case(title, device(samples), advice=advice))

    if inputs:
        names = " and ".join(map(repr, inputs))
        advice = "divide by a spread or a length with a little added to it: x / (x.std(0) + 1e-6)"
        of(f"zeros alone in {names}", inputs, _put_all(lambda array: 0), advice)
    for name in inputs[:1]:
        advice = (
            "put batch norm in front of the model, or scale these numbers in the app before they "
            "are given to Tessera; a smaller learning rate alone seldom helps"
        )
        for said, centre, spread in (
            ("a pressure of 101,325 Pa", _PRESSURE, _SPREAD),
            ("a clock's 1,700,000,000 s", _CLOCK, _DAY),
        ):

            def raw(array: NDArray[Any], centre: float = centre, spread: float = spread) -> None:
                column = array[..., 0] if array.ndim > 1 else array
                column[...] = centre + spread * rng.standard_normal(column.shape)

            of(f"raw {name!r}, such as {said}", [name], raw, advice)
        advice = "leave such samples out in the app, or fill the number in"
        of(f"a NaN in {name!r}", [name], _put_first(np.nan), advice)
    if [dtypes[name] for name in labels] == [np.float32]:
        of(
            f"raw {min(labels)!r} to learn, such as a pressure of 101,325 Pa",
            labels,
            _put_all(lambda array: _PRESSURE + _SPREAD * rng.standard_normal(array.shape)),
            "where devices have such, scale these numbers in the app before they are given to "
            "Tessera, and what the model predicts back",
        )
    for name in sorted(labels):
        kind = dtypes[name].kind
        if kind != "f":
            advice = "a loss that compares classes needs a value for samples of a single class"
            alike = _put_all(lambda array: array[:1])
            of(f"the same {name!r} in all samples", [name], alike, advice)
        if kind in "fi":
            value = np.nan if kind == "f" else _NO_CLASS
            said = f"a label missing ({'NaN' if kind == 'f' else value} in {name!r})"
            of(said, [name], _put_first(value), "leave samples without a label out in the app")
    return tuple(found)


def _put_first(value: float) -> Callable[[NDArray[Any]], None]:
    def put(array: NDArray[Any]) -> None:
        array.reshape(-1)[0] = value

    return put


def _put_all(value: Callable[[NDArray[Any]], Any]) -> Callable[[NDArray[Any]], None]:
    def put(array: NDArray[Any]) -> None:
        array[...] = value(array)

    return put


def ids_out_of_range(
    manifest: Manifest, batch_size: int, draw: Make, trains: Trains
) -> Iterator[Finding]:
    """What becomes of a label or an id below 0, and of the first one that is too large: looked for
    among the sizes of the model's tensors first. Nothing where any number trains."""
    labels = label_entries(manifest)
    ports = [port for port in sample_entries(manifest) if DTYPES[port.dtype].kind == "i"]
    inputs = [port.of for port in ports if port.of not in labels]
    sizes = {
        length
        for _, member in manifest.members()
        for length in resolve(member.shape, manifest.example_sizes)
    }

    def found(name: str, value: int, title: str, advice: str) -> Finding:
        drawn = draw(usual_samples(batch_size))
        samples = {each: array.copy() for each, array in drawn.items()}
        samples[name].reshape(-1)[0] = value
        return trains(Case(title, LocalData(samples, dict(draw(_PUBLIC_ROWS))), advice=advice))

    for name in [*inputs[:_ENTRIES_TRIED], *sorted(labels & {port.of for port in ports})]:
        what = "a label" if name in labels else "an id"
        leave = (
            "leave such samples out in the app, or export a model with more classes"
            if name in labels
            else "give what the model does not know an id of its own in the app, or leave it out"
        )
        yield found(name, -1, f"{what} of -1 in {name!r}", leave)
        zero = found(name, 0, f"{what} of 0 in {name!r}", leave)
        least = int(zero.outcome != "trains")
        if least:
            yield zero

        def fails(value: int, name: str = name) -> bool:
            return found(name, value, f"{value} in {name!r}", "").outcome != "trains"

        bound = _bound(fails, sizes)
        if bound is not None:
            title = f"{what} of {bound:,} in {name!r} ({least} to {bound - 1:,} train)"
            yield found(name, bound, title, leave)


def _bound(fails: Callable[[int], bool], sizes: Iterable[int]) -> int | None:
    """The least number that fails, above 1; None where none does. ``sizes``: of which it may be."""
    likely = sorted({size for size in sizes if 1 < size < _NUMBERS_BEYOND} | {_NUMBERS_BEYOND})
    if not fails(likely[-1]):
        return None
    low, high = -1, len(likely) - 1  # likely[high] fails, likely[low] does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(likely[middle]) else (middle, high)
    below, bound = likely[low] if low >= 0 else 1, likely[high]
    if bound - below > 1 and not fails(bound - 1):
        return bound
    while bound - below > 1:
        middle = (below + bound) // 2
        below, bound = (below, middle) if fails(middle) else (middle, bound)
    return bound


# What became of them, in sentences.


def sentences(findings: Iterable[Finding]) -> list[str]:
    """A line an outcome with its reason, in the words of the first; and what to do."""
    found: dict[tuple[str, str, str], list[Finding]] = {}
    for each in findings:
        advice = each.case.advice if each.outcome in ("fails", "refused") else ""
        found.setdefault((each.outcome, each.reason, advice), []).append(each)
    lines = []
    for (outcome, reason, advice), alike in found.items():
        titles = "; with ".join(each.case.title for each in alike)
        first, _, _ = alike[0].detail.partition(". ")
        detail = f": {first}" if first else ""
        lines.append(f"{outcome}{f' ({reason})' * bool(reason)}: a device with {titles}{detail}")
        lines += [f"  what to do: {advice}"] if advice else []
    return lines


def problem_of(findings: Sequence[Finding]) -> str | None:
    """Why no round would succeed; None where most devices train."""
    bad = [each for each in findings if each.case.usual and each.outcome != "trains"]
    if not bad:
        return None
    first = bad[0]
    return (
        f"a rehearsal found that a device with {first.case.title} "
        f"{first.outcome if first.outcome != 'refused' else 'is refused'}"
        f"{f' ({first.reason})' * bool(first.reason)}: "
        f"{first.detail.partition('. ')[0]}"
    )


# In a process of its own.


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """``lines``: for people. ``problem``: why no round would succeed, or None. ``sizes``: in bytes,
    by what a message carries."""

    lines: tuple[str, ...]
    problem: str | None
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CaseSet:
    """Cases of samples of one kind, and who trains them; ``more``: what further cases come of those
    that went before."""

    cases: tuple[Case, ...]
    train: Trains
    more: Callable[[Trains], Iterable[Finding]] = lambda _: ()


def supervise(
    module: str, arguments: Sequence[str], limits: TrialLimits, folder: Path
) -> Rehearsed | None:
    """The result of a module that ends with :func:`finish`, which writes it into ``folder``.

    None where no process, or no onnxruntime, is to be had.
    """
    out = folder / "rehearsed.json"
    try:
        result = supervised(module, [str(out), *arguments], limits)
    except Untried as why:
        return Rehearsed((f"there was no rehearsal: {why}",), None)
    if result is None:
        return None
    if result.reason is Reason.STEP_TOO_LONG:
        return Rehearsed((f"the rehearsal was ended: {result.detail} (--step-seconds)",), None)
    if result != PASSED:
        return Rehearsed((), f"the rehearsal did not come to its end: {result.detail}")
    told = json.loads(out.read_text(encoding="utf-8"))
    return Rehearsed(tuple(told["lines"]), told["problem"], told["sizes"])


def finish(
    out: str,
    ways: Iterable[CaseSet],
    seconds: float,
    title: str,
    problem: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> NoReturn:
    """Train each case of the first of ``ways`` whose most usual case trains (else of the first),
    write what became of them, and end this process. ``problem``: known without them; ``sizes``: of
    messages, asked for once all have been trained."""
    tried: list[list[Finding]] = []
    for way in ways:
        train = partial(_found, way.train, seconds)
        tried.append([train(way.cases[0])])
        if tried[-1][0].outcome == "trains":
            tried[0] = [*tried[-1], *map(train, way.cases[1:]), *way.more(train)]
            break
    findings = tried[0] if tried else []
    said = [str(each.progress) for each in findings[:1] if each.outcome == "trains"]
    lines = [title, *(f"  {line}" for line in [*filter("None".__ne__, said), *sentences(findings)])]
    told = {"lines": lines, "problem": problem or problem_of(findings), "sizes": dict(sizes or {})}
    Path(out).write_text(json.dumps(told), encoding="utf-8")
    end(0)


def _found(train: Trains, seconds: float, case: Case) -> Finding:
    say(f"the rehearsal of a device with {case.title}", seconds)
    try:
        return train(case)
    except Exception as error:  # a method of somebody else's may raise anything
        return Finding(case, "fails", "error", in_words(error))


def main() -> None:
    """Rehearse the artifact of a folder alone: two passes over each case, its batches as large as
    the example's."""
    limits, (out, folder) = begin()
    from device_sdk.methods.learner import Declined
    from device_sdk.methods.local_steps import Epochs, train_epochs
    from device_sdk.train.job import reason_of
    from device_sdk.train.noting import NotingTrainer
    from device_sdk.wire.arrays.tensors import Codec, encode_tensors

    say("opening its train graph", limits.seconds)
    trainer = NotingTrainer(folder, providers="cpu")
    manifest, rng = trainer.artifact, np.random.default_rng(0)
    entries = sample_entries(manifest)
    needed = {port.of for port in manifest.graphs["train"].select("batch")}
    given = {port.of for port in entries}
    if not given or needed != given:
        rest = ", ".join(sorted(needed - given)[:5])
        why = f"a task's method gives {rest}" if given else "no entry is cut into samples"
        finish(out, (), limits.seconds, f"not rehearsed alone: {why}; see task check")
    batch_size = rows_of_example(manifest)

    def train(case: Case) -> Finding:
        trainer.reset()
        trainer.begin_notes()
        try:
            for _ in range(MORE_TIMES):
                train_epochs(trainer, case.data.train, Epochs(batch_size, 2), rng)
                if trainer.has_moved or not case.usual:
                    break
            whole = [*trainer.parameters.values(), *trainer.buffers.values()]
            encode_tensors({f"w{i}": array for i, array in enumerate(whole)}, Codec.FLOAT16)
            return LossProgress(*trainer.notes()).finding(case)
        except Declined as why:
            return Finding(case, "declines", why.reason.value, str(why))
        except Exception as error:
            return Finding(case, "fails", reason_of(error).value, in_words(error))

    def way(draw: Make) -> CaseSet:
        found = cases(manifest, batch_size, rng, draw)
        return CaseSet(found, train, partial(ids_out_of_range, manifest, batch_size, draw))

    ways = map(way, made_up(manifest, rng))
    title = f"rehearsed {manifest.name!r} with made-up data, steps of {batch_size} samples:"
    finish(out, ways, limits.seconds, title)


if __name__ == "__main__":
    main()
