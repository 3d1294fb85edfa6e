"""What the methods read: a device's update up to its absorption, and an aggregator's broadcast."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.attention import AttentionMethod, AttentionSettings
from aggregator.methods.fedavg import FedAvgMethod
from aggregator.methods.method import Binding, Method
from aggregator.methods.mutual import MutualMethod, MutualSettings
from aggregator.methods.prototypes import PrototypesMethod, PrototypesSettings
from aggregator.methods.scatter import ScatterMethod, ScatterSettings
from aggregator.methods.teacher_logits import TeacherLogitsMethod
from device_sdk.artifact.flat_layout import FlatLadder, flat_layout
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.attention.fleet import read_fleet
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.mutual.contract import (
    LabelForm,
    MutualTraining,
    SampleEntry,
    SampleForm,
    decode_samples,
    decode_soft_labels,
    encode_samples,
    encode_soft_labels,
    samples_mark,
)
from device_sdk.methods.prototypes.contract import PrototypesTraining, encode_prototypes
from device_sdk.methods.registry import METHODS, load_method
from device_sdk.methods.scatter.contract import (
    BprTraining,
    LeastSquaresTraining,
    LossName,
    decode_scatter_update,
    encode_scatter_update,
)
from device_sdk.methods.teacher_logits.contract import (
    TeacherLogitsTraining,
    decode_knowledge,
    encode_knowledge,
    share_of,
)
from device_sdk.wire.arrays.exchange import Broadcast, Scalar, Update, decode_update, encode_update
from device_sdk.wire.arrays.tensors import Codec, TensorLimits, decode_tensors, encode_tensors
from device_sdk.wire.codec.errors import WireError
from tests.fuzz.target import Target

# Not those that somebody installed beside ours.
_PROJECT = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
METHOD_NAMES = tuple(_PROJECT["project"]["entry-points"][METHODS])
_LIMITS = TensorLimits(most_bytes=1 << 20)
_CLASSES, _SENDER = 5, "0" * 32
_ENTRIES = {
    "x": SampleEntry("float32", (2, 3)),
    "age": SampleEntry("int32", ()),
    "known": SampleEntry("bool", (2,)),
    "y": SampleEntry("int64", ()),
}
_SAMPLE_FORMS: tuple[SampleForm, ...] = ("uint8", "deflate", "float16", "float32")
_BOUNDED = TeacherLogitsTraining(_CLASSES, least_confidence=0.2, most_confidence=0.9)
_KNOWLEDGE = (
    _BOUNDED,
    replace(_BOUNDED, precision="int8", weights="samples"),
    replace(_BOUNDED, top_classes=2, weights="samples"),
    replace(_BOUNDED, precision="int8", top_classes=2),
)
_PROTOTYPES = PrototypesTraining(_CLASSES, width=3)
_MUTUAL = MutualTraining(classes=_CLASSES, sample_form="deflate")
_NARROW, _WIDE = (
    flat_layout({"a.weight": (width, 2), "a.bias": (width,), "b.weight": (2, width)})
    for width in (2, 3)
)
_ATTENTION = AttentionSettings(training=AttentionTraining(aggregator_mixes=False, sketch_rows=8))


def _label_form(number: int) -> tuple[LabelForm, int]:
    return ("uint8" if number & 1 else "float16", number >> 1 & 3)


def _soft_labels(data: bytes) -> None:
    """The first byte says how the labels travel."""
    form, top = _label_form(data[0] if data else 0)
    rows = decode_soft_labels(decode_tensors(data[1:], limits=_LIMITS), _CLASSES, form, top)
    assert rows.dtype == np.float32 and rows.shape[1:] == (_CLASSES,)
    assert (rows >= 0).all()
    assert not rows.size or np.abs(rows.sum(axis=1) - 1).max() < 1e-5


def _public_samples(data: bytes) -> None:
    coded = decode_tensors(data, limits=_LIMITS)
    samples = decode_samples(coded, _ENTRIES, most=1000)
    assert len({len(array) for array in samples.values()}) == 1
    for name, entry in _ENTRIES.items():
        found = samples[name]
        assert found.dtype == entry.dtype and found.shape[1:] == entry.shape
        assert np.isfinite(found).all()
        if found.dtype.kind in "iu":
            assert (found == coded[name]).all(), "a whole number became another one"


def _label_knowledge(data: bytes) -> None:
    """The first byte says which task's knowledge the rest is."""
    training = _KNOWLEDGE[data[0] % len(_KNOWLEDGE) if data else 0]
    knowledge = decode_knowledge(decode_tensors(data[1:], limits=_LIMITS), training)
    share = share_of(knowledge, training)
    assert np.isfinite(share.sums).all() and (share.sums >= 0).all()
    np.testing.assert_allclose(share.sums.sum(axis=1), share.weights, rtol=1e-3)


def _settings(data: bytes) -> None:
    """A broadcast's settings, as each method's learner reads them."""
    told = decode_update(data, 1).metadata
    kinds = [
        get_type_hints(load_method(METHODS, method, Binding).settings_class)["training"]
        for method in METHOD_NAMES
    ]
    for kind in (*kinds, LeastSquaresTraining):
        if told.get("loss") == getattr(kind, "LOSS", told.get("loss")) and all(
            name in told for name in kind.__dataclass_fields__
        ):
            read: Any = kind.from_scalars(told)
            assert kind.from_scalars(read.as_scalars()) == read


def _fleet(data: bytes) -> None:
    """A broadcast of attention, its tensors and settings in an update's form."""
    body = decode_update(data, 1)
    fleet = read_fleet(Broadcast(1, 0, body.tensors, body.metadata), _NARROW)
    assert fleet.shared.shape == (_NARROW.size,)
    assert len(fleet.senders) == len(fleet.sketches) == len(fleet.clusters) == len(fleet.widths)


def _fedavg() -> FedAvgMethod:
    return FedAvgMethod({"weight": np.ones((3, 2), np.float32), "bias": np.ones(3, np.float32)})


def _attention() -> AttentionMethod:
    return AttentionMethod(
        np.ones(_WIDE.size, np.float32), FlatLadder((_NARROW, _WIDE)), _ATTENTION
    )


def _mutual() -> MutualMethod:
    return MutualMethod(_ENTRIES, MutualSettings(_MUTUAL))


def _teacher_logits() -> TeacherLogitsMethod:
    return TeacherLogitsMethod(_KNOWLEDGE[1])


def _prototypes() -> PrototypesMethod:
    settings = PrototypesSettings(_PROTOTYPES, most_length=2.0)
    return PrototypesMethod(settings, np.random.default_rng(0))


def _scatter(loss: LossName = "least-squares") -> ScatterMethod:
    return ScatterMethod(np.ones((6, 4), np.float32), ScatterSettings(loss))


def _triples() -> ScatterMethod:
    return _scatter("bpr")


def _whole_update(body: bytes, round_id: int) -> Update:
    return decode_update(body, round_id, _SENDER)


def _items_update(body: bytes, round_id: int) -> Update:
    return decode_scatter_update(body, round_id, 6, 4)


def _absorbing(
    make: Callable[[], Method], decode: Callable[[bytes, int], Update]
) -> Callable[[bytes], None]:
    """An update that ``check`` lets through must be absorbed, closed and broadcast again."""

    def run(data: bytes) -> None:
        method = make()
        method.open_round(1)
        update = decode(data, 1)
        method.check(update)
        method.absorb(update)
        summary = method.close_round()
        assert summary.participants == 1
        assert all(np.isfinite(value) for value in summary.metrics.values())
        for array in method.open_round(2).tensors.values():
            assert array.dtype.kind != "f" or np.isfinite(array).all()
        again = make()
        again.restore(method.state())

    return run


def _body(tensors: Mapping[str, NDArray[Any]], **metadata: Scalar) -> bytes:
    return encode_update(Update(1, tensors, metadata), Codec.FLOAT32)


def _rows(count: int) -> NDArray[np.float32]:
    rows = np.random.default_rng(count).random((count, _CLASSES), dtype=np.float32)
    normal: NDArray[np.float32] = rows / rows.sum(axis=1, keepdims=True)
    return normal


def _label_seeds() -> Sequence[bytes]:
    return [
        bytes((number,))
        + encode_tensors(encode_soft_labels(_rows(3), *_label_form(number)), Codec.FLOAT32)
        for number in range(8)
    ]


def _samples(form: SampleForm) -> dict[str, NDArray[Any]]:
    samples = {
        "x": np.arange(12, dtype=np.float32).reshape(2, 2, 3),
        "age": np.asarray([3, 70_000], dtype=np.int32),
        "known": np.eye(2, dtype=np.bool_),
        "y": np.asarray([0, 4], dtype=np.int64),
    }
    return encode_samples(samples, form)


def _sample_seeds() -> Sequence[bytes]:
    return [encode_tensors(_samples(form), Codec.FLOAT32) for form in _SAMPLE_FORMS]


def _knowledge(training: TeacherLogitsTraining) -> dict[str, NDArray[Any]]:
    labels, counts = np.asarray([0, 3]), np.asarray([7, 20_000])
    return encode_knowledge(LabelKnowledge(labels, counts, _rows(2)), training)


def _knowledge_seeds() -> Sequence[bytes]:
    return [
        bytes((place,)) + encode_tensors(_knowledge(training), Codec.FLOAT32)
        for place, training in enumerate(_KNOWLEDGE)
    ]


def _settings_seeds() -> Sequence[bytes]:
    trainings = (
        _ATTENTION.training,
        FedAvgTraining(),
        _MUTUAL,
        _PROTOTYPES,
        BprTraining(),
        LeastSquaresTraining(),
        _KNOWLEDGE[2],
    )
    return [_body({}, **training.as_scalars()) for training in trainings]


def _attention_updates() -> Sequence[bytes]:
    told = {"samples": 9, "mixture": False, "loss": 0.5}
    return [
        _body({"vector": np.ones(layout.size, np.float32)}, rung=rung, **told)
        for rung, layout in enumerate((_NARROW, _WIDE), 1)
    ]


def _fleet_seeds() -> Sequence[bytes]:
    method = _attention()
    broadcasts = [method.open_round(1)]
    for place, body in enumerate(_attention_updates()):
        method.absorb(decode_update(body, 1, f"{place:032x}"))
    method.close_round()
    broadcasts.append(method.open_round(2))
    return [_body(each.tensors, **each.settings) for each in broadcasts]


def _mutual_updates() -> Sequence[bytes]:
    found = [_body({}, local_loss=0.5)]
    labels = encode_soft_labels(_rows(2), _MUTUAL.label_form)
    for form in _SAMPLE_FORMS:
        coded = _samples(form)
        public = {f"public.{name}": array for name, array in coded.items()}
        told: dict[str, Scalar] = {"mark": samples_mark(coded), "public_loss": 0.5}
        found.append(_body({**public, **labels}, **told))
    return found


def _prototypes_updates() -> Sequence[bytes]:
    labels, means = np.asarray([0, 3]), np.asarray([[0.5, 0, 2], [9, -1, 0]], np.float32)
    return [_body(encode_prototypes(LabelKnowledge(labels, np.asarray([7, 20_000]), means)))]


def _fedavg_updates() -> Sequence[bytes]:
    arrays = {"w.weight": np.ones((3, 2), np.float32), "w.bias": np.ones(3, np.float32)}
    return [_body(arrays, samples=9, loss=0.5)]


def _scatter_updates() -> Sequence[bytes]:
    rng = np.random.default_rng(0)
    found = []
    for users, codec in ((1, "int8"), (1, "float32"), (2, "int8"), (300, "float16")):
        height = min(users, 2)
        arrays: dict[str, NDArray[Any]] = {
            "rows": np.asarray([1, 4]),
            "pulls": np.ones((2, height), np.float32),
            "factor": np.eye(height, 4, dtype=np.float32),
            "counts": np.asarray([1, users]),
            "users": np.asarray(users),
            "k": np.asarray(2),
        }
        found.append(encode_scatter_update(Update(1, arrays), 4, codec, rng))
    return found


def _triples_updates() -> Sequence[bytes]:
    arrays: dict[str, NDArray[Any]] = {
        "columns": np.asarray([0, 2]),
        "rows": np.asarray([1, 4]),
        "values": np.ones((2, 2), np.float32),
    }
    rng = np.random.default_rng(0)
    return [encode_scatter_update(Update(1, arrays), 4, "int8", rng)]


_MAKES: Mapping[str, tuple[Callable[[], Method], Callable[[bytes, int], Update]]] = {
    "attention": (_attention, _whole_update),
    "fedavg": (_fedavg, _whole_update),
    "mutual": (_mutual, _whole_update),
    "prototypes": (_prototypes, _whole_update),
    "scatter": (_scatter, _items_update),
    "teacher_logits": (_teacher_logits, _whole_update),
}
_UPDATES: Mapping[str, Callable[[], Sequence[bytes]]] = {
    "attention": _attention_updates,
    "fedavg": _fedavg_updates,
    "mutual": _mutual_updates,
    "prototypes": _prototypes_updates,
    "scatter": _scatter_updates,
    "teacher_logits": lambda: [_body(_knowledge(_KNOWLEDGE[1]))],
}
_WIRE = (WireError,)
# A learner and a method name these refusals: the decoder says what was wrong with a ValueError.
_NAMED = (WireError, ValueError)
METHOD_TARGETS = (
    Target("soft-labels", _soft_labels, _label_seeds, _WIRE),
    Target("public-samples", _public_samples, _sample_seeds, _WIRE),
    Target("label-knowledge", _label_knowledge, _knowledge_seeds, _NAMED),
    Target("settings", _settings, _settings_seeds, _NAMED),
    Target("attention-fleet", _fleet, _fleet_seeds, (WireError, LearnerError)),
    # A method that has no entry in the table cannot be added without being noticed here.
    *(
        Target(f"{name.replace('_', '-')}-update", _absorbing(*_MAKES[name]), _UPDATES[name], _WIRE)
        for name in METHOD_NAMES
    ),
    Target("scatter-bpr-update", _absorbing(_triples, _items_update), _triples_updates, _WIRE),
)
