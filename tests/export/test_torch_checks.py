"""What torch does around a model, and a recorded step does without: checks of data, autocast."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk import Trainer


def test_a_transformer_takes_its_mask(assert_parity: Callable[..., export.Exported]) -> None:
    """torch compares it with a causal one, element by element."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)
            other = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.decoder = nn.TransformerDecoder(other, 1)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            band = torch.ones(x.shape[1], x.shape[1]).tril(1) == 0
            memory = self.encoder(x, mask=mask)
            seen: Tensor = self.decoder(x, memory, tgt_mask=mask, memory_mask=band)
            return seen

    torch.manual_seed(0)
    assert_parity(Model(), {"x": torch.randn(3, 4, 8)})


def test_distributions_are_not_validated(
    assert_parity: Callable[..., export.Exported], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch.compile, once called in a process, turns torch's checks off.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            mean, scale = self.linear(x).chunk(2, -1)
            found = torch.distributions.Normal(mean, torch.exp(scale), validate_args=True)
            return -found.log_prob(x[:, :4])

    torch.manual_seed(0)
    before = torch.distributions.Distribution.__init__
    assert_parity(Model(), {"x": torch.randn(4, 6)})
    assert torch.distributions.Distribution.__init__ is before
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_is_left_out_and_said(
    enabled: bool, assert_parity: Callable[..., export.Exported]
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        @torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=enabled):
                return torch.tanh(self.linear(x))

    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        assert_parity(Model(), {"x": torch.randn(4, 6)})
    about = [str(each.message) for each in said if "autocast" in str(each.message)]
    assert (about != []) == enabled
    assert all("float32" in each for each in about)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")


class Reduced(nn.Module):
    """Casts of all kinds, a constant that is rounded, and a buffer of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(6, 4), nn.Linear(4, 3).bfloat16()
        self.register_buffer("scale", torch.tensor(50**0.5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.to(torch.bfloat16).float()).half().type(torch.float32)
        y = (y * self.scale.type(y.dtype)).bfloat16() * torch.tensor(0.3, dtype=torch.float16)
        y = torch.softmax(y, -1, dtype=torch.bfloat16) + torch.ones(4, dtype=torch.bfloat16)
        found: Tensor = self.last(y.to(self.last.weight.dtype)).float()
        return found


def test_reduced_precision_is_float32_and_said_once(
    assert_parity: Callable[..., export.Exported],
) -> None:
    torch.manual_seed(0)
    model, x = Reduced(), torch.randn(4, 6)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        exported = assert_parity(model, {"x": x})
    about = [str(each.message) for each in said if "float32 throughout" in str(each.message)]
    assert "'last.weight', torch.bfloat16 (and 2 more of the model's), is" in about.pop(0)
    assert [each.split()[5] for each in about] == ["torch.bfloat16", "torch.float16"]
    assert model.scale.dtype == model.last.weight.dtype == torch.bfloat16
    trainer = Trainer(exported.directory)
    assert trainer.buffers["scale"] == np.float32(7.0625)  # of 50 ** 0.5, rounded
    assert trainer.parameters["last.weight"].dtype == np.float32


def test_the_bits_of_reduced_precision_are_refused(
    assert_parity: Callable[..., export.Exported],
) -> None:
    class Bits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * x.view(torch.bfloat16)[:, :4].float()

    with pytest.raises(export.ExportError, match="bits of a tensor are read as"):
        assert_parity(Bits(6, 4), {"x": torch.randn(4, 6)})
