from __future__ import annotations

import numpy as np
import pytest

from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Refused
from aggregator.methods.server_optimizer import OptimizerSettings
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.wire.arrays.exchange import Update

PARAMETERS = {
    "Conv.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2) / 24,
    "0.bias": np.array([1.0, -1.0], np.float32),
}
BUFFERS = {"norm.mean": np.zeros(3, np.float32), "norm.count": np.zeros((), np.int64)}
SHAPES = {"w.conv.weight": (2, 12), "w.0.bias": (2,), "b.norm.mean": (3,)}


def method(settings: FedAvgSettings | None = None) -> FedAvgMethod:
    return FedAvgMethod(PARAMETERS, BUFFERS, settings)


def update(samples: int | None = 10, seed: int = 0, round_id: int = 1, scale: float = 1) -> Update:
    rng = np.random.default_rng(seed)
    metadata = {"loss": 0.5} if samples is None else {"loss": 0.5, "samples": samples}
    tensors = {
        name: (scale * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    return Update(round_id, tensors, metadata)


def test_names_and_shapes_on_the_wire() -> None:
    sent = method().open_round(1)
    assert {name: array.shape for name, array in sent.tensors.items()} == SHAPES
    np.testing.assert_array_equal(
        sent.tensors["w.conv.weight"], PARAMETERS["Conv.weight"].reshape(2, 12)
    )


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_model_moves_by_the_weighted_mean(weighting: str) -> None:
    training = FedAvgTraining(weighting=weighting)  # type: ignore[arg-type]
    one = method(FedAvgSettings(training=training))
    one.open_round(1)
    counts = [10, 30] if weighting == "samples" else [None, None]
    updates = [update(count, seed) for seed, count in enumerate(counts)]
    for each in updates:
        one.check(each)
        one.absorb(each)
    summary = one.close_round()
    weights = [0.25, 0.75] if weighting == "samples" else [0.5, 0.5]
    for name, before in {**PARAMETERS, "norm.mean": BUFFERS["norm.mean"]}.items():
        wire = f"{'b' if name == 'norm.mean' else 'w'}.{name.lower()}"
        moved = sum(w * u.tensors[wire] for w, u in zip(weights, updates, strict=True))
        np.testing.assert_allclose(
            one.model[name], before + moved.reshape(before.shape), rtol=1e-5, atol=1e-6
        )
    assert (summary.version, summary.participants) == (1, 2)
    assert summary.metrics["loss"] == 0.5


def test_a_claim_of_many_samples_is_capped() -> None:
    capped = method(FedAvgSettings(most_samples=10))
    plain = method()
    for one, claim in ((capped, 10**9), (plain, 10)):
        one.open_round(1)
        for each in (update(10, 1), update(claim, 2)):
            one.check(each)
            one.absorb(each)
        one.close_round()
    np.testing.assert_array_equal(capped.model["Conv.weight"], plain.model["Conv.weight"])


def test_clipping_bounds_the_parameters_difference() -> None:
    one = method(FedAvgSettings(clip_norm=0.5))
    one.open_round(1)
    one.absorb(update(scale=100))
    summary = one.close_round()
    assert summary.metrics["clipped"] == 1
    assert summary.metrics["update_norm"] == pytest.approx(0.5, rel=1e-4)


def test_adam_at_the_server_moves_against_the_mean_difference_negated() -> None:
    adam = OptimizerSettings(name="adam", learning_rate=0.1, beta1=0.9, beta2=0.99, epsilon=1e-6)
    one = method(FedAvgSettings(optimizer=adam))
    one.open_round(1)
    each = update()
    one.absorb(each)
    one.close_round()
    moved = one.model["0.bias"] - PARAMETERS["0.bias"]
    np.testing.assert_allclose(moved, 0.1 * np.sign(each.tensors["w.0.bias"]), rtol=1e-3)
    np.testing.assert_allclose(one.model["norm.mean"], each.tensors["b.norm.mean"], rtol=1e-6)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"round_id": 2}, "bad-round"),
        ({"metadata": {"loss": 1.0}}, "bad-metadata"),
        ({"metadata": {"loss": 1.0, "samples": 0}}, "bad-metadata"),
        ({"metadata": {"loss": 1.0, "samples": True}}, "bad-metadata"),
        ({"metadata": {"loss": "low", "samples": 3}}, "bad-metadata"),
        ({"tensors": {}}, "bad-tensors"),
        ({"tensors": {**update().tensors, "w.more": np.zeros(1, np.float32)}}, "bad-tensors"),
        ({"tensors": {**update().tensors, "w.0.bias": np.zeros(3, np.float32)}}, "bad-values"),
        ({"tensors": {**update().tensors, "w.0.bias": np.zeros(2, np.float16)}}, "bad-values"),
        (
            {"tensors": {**update().tensors, "w.0.bias": np.full(2, np.nan, np.float32)}},
            "bad-values",
        ),
    ],
)
def test_what_does_not_fit_is_refused_for_a_reason(changed: dict, reason: str) -> None:  # type: ignore[type-arg]
    one = method()
    one.open_round(1)
    good = update()
    fields = {"round_id": 1, "tensors": good.tensors, "metadata": good.metadata, **changed}
    with pytest.raises(Refused) as refused:
        one.check(Update(**fields))
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": -1}, "epochs is -1"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"proximal_mu": float("nan")}, "proximal_mu"),
        ({"personal": "a,,b"}, "personal"),
        ({"weighting": "age"}, "weighting"),
        ({"optimizer_state": "old"}, "optimizer_state"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        FedAvgTraining(**settings)


def test_models_without_names_on_the_wire_are_refused() -> None:
    one = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="one name on the wire"):
        FedAvgMethod({"a.B": one, "a.b": one})
    with pytest.raises(ValueError, match="names no parameter"):
        FedAvgMethod({"a": one}, settings=FedAvgSettings(training=FedAvgTraining(personal="b")))
    with pytest.raises(ValueError, match="no float32 parameter is left"):
        FedAvgMethod({"a": one}, settings=FedAvgSettings(training=FedAvgTraining(personal="a")))
