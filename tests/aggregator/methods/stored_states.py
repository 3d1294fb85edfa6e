"""Methods in the middle of a round, and what earlier versions of this program stored of them.

``states/*.npz`` hold of each case ``middle``, the state within its last round, and ``end``, the
state after the rest of that round and the opening of the next. They were written with the commit
84f1e0f; those of scatter and averaging, which sum integers since, with the one that brought that,
and the end of ``scatter-many`` with the one since which a held round is judged by itself; those of
prototypes with the one that brought them.
What be46148 wrote of these, when they summed floats, is in ``states/floats``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.methods.attention import AttentionMethod, AttentionSettings
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Method
from aggregator.methods.mutual import MutualMethod, MutualSettings
from aggregator.methods.prototypes import PrototypesMethod, PrototypesSettings
from aggregator.methods.scatter import ScatterMethod, ScatterSettings
from aggregator.methods.server_optimizer import OptimizerSettings
from aggregator.methods.teacher_logits import TeacherLogitsMethod
from aggregator.methods.trained_prototypes import PrototypeServerSettings
from device_sdk.artifact.flat_layout import flat_layout
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.fedavg.contract import shared_tensors
from device_sdk.methods.mutual.contract import (
    MutualTraining,
    SampleEntry,
    encode_samples,
    encode_soft_labels,
    samples_mark,
)
from device_sdk.methods.prototypes.contract import PrototypesTraining, encode_prototypes
from device_sdk.methods.state import State
from device_sdk.methods.teacher_logits.contract import (
    LabelKnowledge,
    TeacherLogitsTraining,
    encode_knowledge,
)
from device_sdk.wire.arrays.exchange import Update

STATES = Path(__file__).with_name("states")
_PLAIN = OptimizerSettings(name="plain", learning_rate=1.0)
_LAYOUTS = [
    flat_layout({"a.weight": (width, 3), "a.bias": (width,), "b.weight": (4, width)})
    for width in (2, 5)
]
_LABELS = TeacherLogitsTraining(classes=3, least_confidence=0.2)


@dataclass(frozen=True)
class Case:
    """``update(round, device)`` is a device's; ``rounds`` says which devices come in each, and
    before how many of the last round's the state was taken."""

    method: str
    build: Callable[[], Method]
    update: Callable[[int, int], Update]
    rounds: Sequence[Sequence[int]]
    after: int = 2

    def middle(self) -> Method:
        """A method that came to the middle of the last round by itself."""
        one = self.build()
        for number, devices in enumerate(self.rounds, 1):
            one.open_round(number)
            last = number == len(self.rounds)
            for device in devices[: self.after] if last else devices:
                _take(one, self.update(number, device))
            if not last:
                one.close_round()
        return one

    def go_on(self, one: Method) -> None:
        """From the middle to the end."""
        number = len(self.rounds)
        for device in self.rounds[-1][self.after :]:
            _take(one, self.update(number, device))
        one.close_round()
        one.open_round(number + 1)


def _take(one: Method, update: Update) -> None:
    one.check(update)
    one.absorb(update)


def _sender(device: int) -> str:
    return f"{device:032x}" if device else ""


def _scatter(chosen: ScatterSettings) -> Callable[[], Method]:
    items = np.random.default_rng(0).standard_normal((12, 6), dtype=np.float32)
    return lambda: ScatterMethod(items, chosen)


def _scatter_update(number: int, device: int) -> Update:
    rng = np.random.default_rng([number, device])
    rows = np.sort(rng.choice(12, size=5, replace=False))
    columns = np.sort(rng.choice(6, size=1 + device % 6, replace=False))
    scale = 30.0 if device == 5 else 1.0
    values = (scale * rng.standard_normal((5, len(columns)))).astype(np.float32)
    tensors = {"rows": rows, "columns": columns, "values": values}
    return Update(number, tensors, sender=_sender(device))


_MODEL = {
    "Conv.weight": np.random.default_rng(1).standard_normal((3, 4), dtype=np.float32),
    "bias": np.zeros(3, np.float32),
}
_BUFFERS = {"bn.running_var": np.ones(2, np.float32)}


def _fedavg(chosen: FedAvgSettings) -> Callable[[], Method]:
    return lambda: FedAvgMethod(_MODEL, _BUFFERS, chosen)


def _fedavg_update(number: int, device: int) -> Update:
    rng = np.random.default_rng([number, device])
    scale = 30.0 if device == 5 else 1.0
    tensors = {
        one.wire_name: (scale * rng.standard_normal(one.wire_shape)).astype(np.float32)
        for one in shared_tensors(_MODEL, _BUFFERS)
    }
    said = {"loss": 0.5 + device, "samples": 10 * (device + 1)}
    return Update(number, tensors, said, _sender(device))


def _mutual(**changes: Any) -> Callable[[], Method]:
    entries = {"x": SampleEntry("float32", (2,)), "y": SampleEntry("int64", ())}
    training = MutualTraining(3, **changes)
    return lambda: MutualMethod(entries, MutualSettings(training))


def _soft(seed: Sequence[int], count: int) -> np.ndarray:
    raw = np.random.default_rng(list(seed)).random((count, 3)).astype(np.float32) + 0.1
    return encode_soft_labels(raw / raw.sum(1, keepdims=True), "float16")["labels"]


def _public(device: int) -> tuple[dict[str, Any], str]:
    rng = np.random.default_rng(device)
    x, y = rng.standard_normal((3 + device, 2)).astype(np.float32), rng.integers(0, 3, 3 + device)
    coded = encode_samples({"x": x, "y": y}, "uint8")
    return {f"public.{name}": array for name, array in coded.items()}, samples_mark(coded)


def _mutual_update(number: int, device: int) -> Update:
    tensors, said = {"labels": _soft([number, device], 3 + device)}, {"local_loss": 1.5}
    if number == 1 or device == 4:
        public, mark = _public(device)
        return Update(number, tensors | public, said | {"mark": mark}, _sender(device))
    return Update(number, tensors, said, _sender(device))


def _mean_update(number: int, device: int) -> Update:
    if number == 1:
        public, mark = _public(device)
        return Update(number, public, {"local_loss": 1.5, "mark": mark}, _sender(device))
    tensors = {f"labels.{_sender(owner)}": _soft([number, device], 3 + owner) for owner in (1, 2)}
    return Update(number, tensors, {"conflict_share": 0.25}, _sender(device))


def _labels_update(number: int, device: int) -> Update:
    rng = np.random.default_rng([number, device])
    labels = np.flatnonzero(rng.random(3) < 0.7)
    means = rng.dirichlet(np.ones(3), size=len(labels)).astype(np.float32).reshape(-1, 3)
    counts = rng.integers(1, 9, size=len(labels))
    return Update(number, encode_knowledge(LabelKnowledge(labels, counts, means), _LABELS))


_EMBEDDED = PrototypesTraining(classes=3, width=4)


def _prototypes(**chosen: Any) -> Callable[[], Method]:
    settings = PrototypesSettings(_EMBEDDED, most_length=3.0, **chosen)
    return lambda: PrototypesMethod(settings, np.random.default_rng(0))


def _prototypes_update(number: int, device: int) -> Update:
    rng = np.random.default_rng([number, device])
    labels = np.flatnonzero(rng.random(3) < 0.7)
    means = rng.standard_normal((len(labels), 4)).astype(np.float32) + device
    knowledge = LabelKnowledge(labels, rng.integers(1, 9, size=len(labels)), means)
    return Update(number, encode_prototypes(knowledge), sender=_sender(device))


def _attention() -> Method:
    told = AttentionTraining(warm_up_rounds=1, sketch_rows=8)
    start = np.zeros(_LAYOUTS[-1].size, np.float32)
    return AttentionMethod(start, _LAYOUTS, AttentionSettings(training=told, keep_rounds=2))


def _attention_update(number: int, device: int) -> Update:
    width = device % 2
    rng = np.random.default_rng([number, device])
    vector = rng.standard_normal(_LAYOUTS[width].size).astype(np.float32)
    said = {"samples": 10 + device, "width": width, "mixture": device == 3, "loss": 0.1 * device}
    return Update(number, {"vector": vector}, said, _sender(device))


_MANY = ScatterSettings(
    robust="median", clip_norm=9.0, item_multiple=2.0, outlier_multiple=3.0, row_multiple=2.0
)
_ROUNDS = ((1, 2, 3, 4), (2, 0, 5, 3), (1, 4, 5, 2, 0))
CASES = {
    "scatter": Case("scatter", _scatter(ScatterSettings()), _scatter_update, _ROUNDS),
    "scatter-waiting": Case(
        "scatter", _scatter(ScatterSettings()), _scatter_update, ((1, 2, 3, 4),)
    ),
    "scatter-many": Case("scatter", _scatter(_MANY), _scatter_update, _ROUNDS, 4),
    "scatter-unlimited": Case(
        "scatter",
        _scatter(ScatterSettings(optimizer=_PLAIN, clip_multiple=0.0, row_multiple=0.0)),
        _scatter_update,
        _ROUNDS,
    ),
    "fedavg": Case("fedavg", _fedavg(FedAvgSettings()), _fedavg_update, _ROUNDS),
    "fedavg-waiting": Case("fedavg", _fedavg(FedAvgSettings()), _fedavg_update, ((1, 2, 3, 4),)),
    "fedavg-many": Case(
        "fedavg",
        _fedavg(
            FedAvgSettings(
                optimizer=OptimizerSettings(learning_rate=0.1, beta1=0.9),
                robust="trimmed",
                outlier_multiple=3.0,
            )
        ),
        _fedavg_update,
        _ROUNDS,
    ),
    "mutual": Case("mutual", _mutual(), _mutual_update, ((1, 2, 3), (2, 4, 1))),
    "mutual-mean": Case("mutual", _mutual(combine="mean"), _mean_update, ((1, 2), (1, 2, 3))),
    "teacher_logits": Case(
        "teacher_logits", lambda: TeacherLogitsMethod(_LABELS), _labels_update, _ROUNDS
    ),
    "prototypes": Case("prototypes", _prototypes(), _prototypes_update, _ROUNDS),
    "prototypes-trained": Case(
        "prototypes",
        _prototypes(trained=True, server=PrototypeServerSettings(epochs=5)),
        _prototypes_update,
        _ROUNDS,
    ),
    "attention": Case("attention", _attention, _attention_update, ((1, 2, 3), (2, 4, 3, 1))),
}


FLOATS = tuple(name for name, case in CASES.items() if case.method in ("scatter", "fedavg"))
"""Cases of which ``states/floats`` has one too."""


def stored(case: str, when: str, folder: str = "") -> State:
    """``middle`` or ``end`` of a case, as the earlier version stored it."""
    with np.load(STATES / folder / f"{case}.npz", allow_pickle=False) as file:
        return {n.removeprefix(f"{when}/"): file[n] for n in file.files if n.startswith(when)}


def written() -> Iterator[tuple[str, dict[str, Any]]]:
    """What the files hold, made anew with this version."""
    for name, case in CASES.items():
        one = case.middle()
        arrays = {f"middle/{key}": array for key, array in one.state().items()}
        case.go_on(one)
        yield name, arrays | {f"end/{key}": array for key, array in one.state().items()}
