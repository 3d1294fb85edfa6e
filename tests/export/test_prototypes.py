"""FedProto's loss, against torch's own terms, and the networks that embed for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from device_sdk import Trainer
from export.losses import example_prototypes, prototype_alignment
from export.models.images import ImageShape, example_images
from export.models.prototypes import embedding_model, prototypes_recipe


def test_the_loss_is_cross_entropy_and_the_distance_to_known_prototypes() -> None:
    g = torch.Generator().manual_seed(0)
    embedding, logits = torch.randn(6, 4, generator=g), torch.randn(6, 3, generator=g)
    embedding.requires_grad_()
    batch = {"label": torch.tensor([0, 1, 2, 2, 1, 0]), **example_prototypes(3, 4)}
    loss, outputs = prototype_alignment(lambda _, __: (embedding, logits))(
        torch.nn.Identity(), batch
    )
    # As the authors' code has it: where there is no prototype, the sample's own embedding.
    towards = torch.where(
        batch["has_prototype"][batch["label"], None] > 0,
        batch["prototype"][batch["label"]],
        embedding.detach(),
    )
    entropy = functional.cross_entropy(logits, batch["label"])
    wanted = entropy + batch["pull"] * functional.mse_loss(embedding, towards)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(outputs["distance"], functional.mse_loss(embedding, towards))
    found = torch.autograd.grad(loss, embedding)[0]
    torch.testing.assert_close(found, torch.autograd.grad(wanted, embedding)[0])


# The others are verified as they are (test_image_models.py): what is added is one layer.
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["resnet", "vgg"])
def test_a_network_embeds_in_the_width_that_is_asked_for(tmp_path: Path, name: str) -> None:
    shape = ImageShape(size=16, classes=4)
    prototypes_recipe(name, shape, width=6).export(tmp_path / "a", with_metrics=True)
    trainer = Trainer(tmp_path / "a", providers="cpu")
    images = example_images(shape, batch=9)
    batch = {"x": images["x"].numpy(), "label": images["y"].numpy()}
    batch |= {key: value.numpy() for key, value in example_prototypes(4, 6).items()}
    batch["pull"] = np.float32(0.01)  # towards random places, against the labels
    losses = [trainer.step(batch, hyper={"lr": 0.01}) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    told = trainer.predict({"x": batch["x"][:5]})
    assert told["embedding"].shape == (5, 6) and (told["embedding"] >= 0).all()
    assert np.allclose(told["probabilities"].sum(1), 1)


def test_first_weights_are_the_seeds() -> None:
    state = torch.random.get_rng_state()
    one, again, other = (embedding_model("lenet", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    x = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.equal(one(x)[1], again(x)[1]) and not torch.equal(one(x)[1], other(x)[1])
