from __future__ import annotations

import numpy as np
import pytest

from device_sdk.methods.scatter.contract import BprTraining, LeastSquaresTraining, LossTraining
from device_sdk.wire.arrays.exchange import Broadcast, Update


def test_tensors_cannot_be_written_through_a_message() -> None:
    items = np.zeros((2, 2), dtype=np.float32)
    broadcast = Broadcast(1, 0, {"items": items})
    with pytest.raises(ValueError, match="read-only"):
        broadcast.tensors["items"][0, 0] = 1
    with pytest.raises(TypeError):
        broadcast.tensors["other"] = items  # type: ignore[index]
    items[0, 0] = 2  # the owner may


@pytest.mark.parametrize("round_id", [-1, True, 1.0])
def test_round_must_be_a_count(round_id: int) -> None:
    with pytest.raises(ValueError, match="round_id"):
        Update(round_id, {})


def test_bad_names_dtypes_and_scalars_are_refused() -> None:
    with pytest.raises(ValueError, match="no name"):
        Update(1, {"Bad Name": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match="complex64"):
        Update(1, {"x": np.zeros(1, np.complex64)})
    with pytest.raises(ValueError, match="list"):
        Update(1, {"x": [1.0]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="finite"):
        Update(1, {}, {"loss": float("nan")})
    with pytest.raises(TypeError, match="NoneType"):
        Update(1, {}, {"loss": None})  # type: ignore[dict-item]


def test_scatter_training_survives_a_broadcast() -> None:
    training = BprTraining(scores="columns", most_triples=32)
    broadcast = Broadcast(1, 0, {}, {**training.as_scalars(), "something_else": 3})
    assert BprTraining.from_scalars(broadcast.settings) == training


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scores", "both"),
        ("user_learning_rate", 0.0),
        ("user_learning_rate", float("inf")),
        ("user_l2", -1.0),
        ("item_l2", "0.1"),
        ("user_spread", 11.0),
        ("most_triples", -1),
        ("most_triples", 1.5),
    ],
)
def test_scatter_training_names_the_bad_setting(name: str, value: object) -> None:
    scalars = {**BprTraining().as_scalars(), name: value}
    with pytest.raises(ValueError, match=name):
        BprTraining.from_scalars(scalars)  # type: ignore[arg-type]


def test_missing_settings_are_listed() -> None:
    with pytest.raises(ValueError, match="user_l2, item_l2"):
        BprTraining.from_scalars(
            {
                "loss": "bpr",
                "scores": "columns",
                "user_learning_rate": 0.1,
                "user_spread": 1,
                "most_triples": 0,
            }
        )


@pytest.mark.parametrize("told", [BprTraining(), LeastSquaresTraining()])
def test_settings_of_another_loss_are_refused(told: LossTraining) -> None:
    other = LeastSquaresTraining if isinstance(told, BprTraining) else BprTraining
    with pytest.raises(ValueError, match=f"loss is '{told.LOSS}'; expected '{other.LOSS}'"):
        other.from_scalars(told.as_scalars())
