"""Click models: their fields, and artifacts that learn what a click depends on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from device_sdk import Trainer
from export.models.click import CLICK_MODELS, ClickDesign, click_model, click_recipe, example_clicks
from export.models.fields import FieldEmbedding, SampleFields, example_fields

SMALL = SampleFields(
    categorical=(("user", 6), ("movie", 9), ("gender", 2)),
    multi_valued=(("genres", 4),),
    numeric=("year",),
    history="movie",
)


def _plain(batch: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    given = {name: value.numpy() for name, value in batch.items()}
    given.update(weight_ce=np.array(1, np.float32), l2=np.array(0, np.float32))
    return {**given, "has_teacher": np.zeros(2, np.float32)}


# The encoding is the same in front of each network: with a history and without shows it.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("network", "attention"),
    [*((name, False) for name in CLICK_MODELS), ("cnn", True), ("din", True)],
)
def test_every_network_exports_and_learns(tmp_path: Path, network: str, attention: bool) -> None:
    # The encoding is verified by itself and with one network: tracing takes long.
    verify = not attention or network == "cnn"
    design = ClickDesign(network, SMALL, 4, attention)
    click_recipe(design).export(tmp_path / "a", verify=verify)
    trainer = Trainer(tmp_path / "a", providers="cpu")
    drawn = example_clicks(design, batch=60, history=3, seed=4)
    # Movies 0 to 4 are clicked; where there is a history, only by those who saw movie 7 or 8.
    clicked = drawn["categories"][:, 1] < 5
    if network == "din":
        clicked &= (drawn["history"] >= 7).any(1)
    drawn["label"] = clicked.long()
    batch = _plain(drawn)
    for _ in range(150):
        trainer.step(batch, hyper={"lr": 0.01})
    told = trainer.predict(batch)
    right = (told["click"] > 0.5) == clicked.numpy()
    assert right.mean() > 0.95
    np.testing.assert_array_equal(trainer.outputs["label_counts"], np.bincount(batch["label"]))
    assert ("field_weights" in told) == attention
    if attention:
        assert told["field_weights"].shape == (60, 5)
        np.testing.assert_allclose(told["field_interactions"].sum(1), 1, rtol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("network", CLICK_MODELS)
def test_the_last_hidden_layer_embeds_in_the_width_that_is_asked_for(
    tmp_path: Path, network: str
) -> None:
    verify = network == "deepfm"  # the loss is verified with one: tracing takes long
    design = ClickDesign(network, SMALL, 4, width=7)
    click_recipe(design).export(tmp_path / "a", verify=verify)
    trainer = Trainer(tmp_path / "a", providers="cpu")
    drawn = example_clicks(design, batch=60, history=3, seed=4)
    batch = {name: value.numpy() for name, value in drawn.items()}
    batch["has_prototype"] = np.ones(2, np.float32)
    batch["pull"] = np.float32(50)
    distances = [(trainer.step(batch), trainer.outputs["distance"])[1] for _ in range(40)]
    assert distances[-1] < 0.9 * distances[0]
    told = trainer.predict(batch)
    assert told["embedding"].shape == (60, 7) and told["click"].shape == (60,)
    with pytest.raises(ValueError, match="no proximal term"):
        click_recipe(design, with_proximal=True)


def test_the_embedding_is_sums_of_rows() -> None:
    torch.manual_seed(0)
    embedding = FieldEmbedding(SMALL, 3, extra=1)
    batch = {
        "categories": torch.tensor([[5, 8, 1], [0, 0, 0]]),
        "genres": torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 0]]),
        "numbers": torch.tensor([[0.5], [-1.0]]),
        "history": torch.tensor([[2, -1], [-1, 8]]),
    }
    fields, history, mask = embedding.with_history(batch)
    table, genres = embedding.table.weight, embedding.multi_valued["genres"]
    assert fields.shape == (2, 5, 4)
    assert torch.equal(fields[0, :3], table[[5, 6 + 8, 6 + 9 + 1]])
    assert torch.equal(fields[1, :3], table[[0, 6, 15]])
    assert torch.allclose(fields[0, 3], genres[0] + genres[2])
    assert torch.equal(fields[1, 3], torch.zeros(4))
    assert torch.allclose(fields[:, 4], torch.tensor([[0.5], [-1.0]]) * embedding.numeric)
    assert torch.equal(history[0, 0], table[6 + 2]) and torch.equal(history[1, 1], table[6 + 8])
    assert mask.tolist() == [[1, 0], [0, 1]]
    assert torch.equal(embedding(batch), fields)


def test_padding_of_a_history_does_not_matter() -> None:
    model = click_model(ClickDesign("din", SMALL)).eval()
    batch = example_fields(SMALL, batch=5, history=3)
    longer = {**batch, "history": torch.cat([batch["history"], -torch.ones(5, 4).long()], 1)}
    assert torch.allclose(model(batch), model(longer), atol=1e-6)
    none = {**batch, "history": -torch.ones(5, 1).long()}
    assert not torch.allclose(model(batch), model(none), atol=1e-6)


def test_the_proximal_artifact_takes_anchors(tmp_path: Path) -> None:
    design = ClickDesign("wide_deep", SMALL, 4)
    click_recipe(design, with_proximal=True).export(tmp_path / "a", verify=False)
    trainer = Trainer(tmp_path / "a", providers="cpu")
    batch = _plain(example_clicks(design))
    free = trainer.step({**batch, "mu": np.array(3, np.float32)})
    trainer.reset()
    trainer.set_parameters({f"anchor.{n}": v + 1 for n, v in trainer.parameters.items()})
    count = sum(v.size for v in trainer.parameters.values())
    pulled = trainer.step({**batch, "mu": np.array(3, np.float32)})
    np.testing.assert_allclose(pulled - free, 1.5 * count, rtol=1e-4)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="no click model 'din2'; expected cnn"):
        ClickDesign("din2")
    with pytest.raises(ValueError, match="din reads a history"):
        ClickDesign("din", SampleFields(categorical=(("movie", 3), ("user", 2))))
    with pytest.raises(ValueError, match="no categorical field"):
        SampleFields(numeric=("year",))
    with pytest.raises(ValueError, match="'user' is taken twice"):
        SampleFields(categorical=(("user", 2),), numeric=("user",))
    with pytest.raises(ValueError, match="history is of 'year'"):
        SampleFields(categorical=(("user", 2),), numeric=("year",), history="year")
    with pytest.raises(ValueError, match="field 'user' has 0 values"):
        SampleFields(categorical=(("user", 0),))
    with pytest.raises(ValueError, match="these fields have no history"):
        FieldEmbedding(SampleFields(categorical=(("user", 2),)), 2).with_history({})
