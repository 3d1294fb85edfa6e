"""The small image networks: sizes as documented, and artifacts that learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from device_sdk import Trainer
from export.models.images import IMAGE_MODELS, ImageShape, example_images, image_model, image_recipe


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("lenet", 61_706), ("resnet", 77_562), ("vgg", 34_282), ("alexnet", 136_330)],
)
def test_documented_sizes_and_seeded_weights(name: str, parameters: int) -> None:
    state = torch.random.get_rng_state()
    model = image_model(name)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sum(p.numel() for p in model.parameters()) == parameters
    again, other = image_model(name), image_model(name, seed=1)
    weights = [next(iter(m.parameters())).detach() for m in (model, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [("lenet", 3, 36), ("resnet", 1, 20), ("vgg", 3, 32), ("alexnet", 1, 28)],
)
def test_every_network_exports_and_learns(
    tmp_path: Path, name: str, channels: int, size: int
) -> None:
    shape = ImageShape(channels, size, 7)
    image_recipe(name, shape).export(tmp_path / "a")
    trainer = Trainer(tmp_path / "a", providers="cpu")
    examples = example_images(shape, batch=12)
    batch = {key: value.numpy() for key, value in examples.items()}
    losses = [trainer.step(batch, hyper={"lr": 0.02}) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    told = trainer.predict({"x": batch["x"][:5]})
    assert told["logits"].shape == (5, 7)
    np.testing.assert_allclose(told["probabilities"].sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("size", [16, 20, 33, 50])
def test_other_sizes_fit(name: str, size: int) -> None:
    model = image_model(name, ImageShape(2, size, 3))
    assert model(torch.zeros(2, 2, size, size)).shape == (2, 3)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="no image model 'lent'; expected lenet"):
        image_model("lent")
    with pytest.raises(ValueError, match="size is 8"):
        ImageShape(size=8)
    with pytest.raises(ValueError, match="classes is 1"):
        ImageShape(classes=1)
    with pytest.raises(ValueError, match="channels is 0"):
        ImageShape(channels=0)
