"""Fourier transforms and the complex numbers that they give, with gradients, as torch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fft

import export
from tests.export.recorded import assert_as_torch


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _parts(z: Tensor) -> list[Tensor]:
    return [z.real, z.imag]


def _frames(x: Tensor, **how: Any) -> Tensor:
    return torch.stft(x, 16, 4, window=torch.hann_window(16), return_complex=True, **how)


def _auto_correlation(x: Tensor) -> Tensor:
    """Autoformer's: values rolled by the lags at which the series resembles itself."""
    spectrum = fft.rfft(x, dim=-1)
    likeness = fft.irfft(spectrum * torch.conj(spectrum), n=x.shape[-1], dim=-1)
    weights, lags = torch.topk(likeness[..., 1:6], 3, dim=-1)  # the others come twice
    rolled = torch.arange(x.shape[-1]) + lags.unsqueeze(-1)
    picked = torch.gather(x.unsqueeze(1).expand(-1, 3, -1), 2, rolled % x.shape[-1])
    return (picked * weights.softmax(-1).unsqueeze(-1)).sum(1)


def _chosen_modes(x: Tensor, weight: Tensor) -> Tensor:
    """FEDformer's: some frequencies times complex weights, the others nothing."""
    spectrum = fft.rfft(x, dim=-1)
    out = torch.zeros(x.shape[0], x.shape[1], 7, dtype=torch.cfloat)
    weights = torch.complex(weight, weight * 2)
    for place, mode in enumerate((0, 2, 5)):
        out[:, :, place] = torch.einsum("bi,io->bo", spectrum[:, :, mode], weights)
    return fft.irfft(out, n=12)


def _filtered(x: Tensor) -> list[Tensor]:
    """Koopa's: a spectrum without some of its frequencies; then in parts."""
    spectrum = fft.rfft(x)
    kept = torch.ones_like(spectrum)
    kept[..., [0, 2]] = 0
    parts = [*(spectrum * kept).chunk(2, -1), *torch.split(spectrum, 2, -1), *spectrum.unbind(-1)]
    return [part for number in parts for part in _parts(number)]


# A rotation of each place by a constant, as a model makes it once.
_TURNS = torch.polar(torch.ones(9, 3), torch.outer(torch.arange(9.0), 0.3 ** torch.arange(3.0)))


def _turned(x: Tensor) -> Tensor:
    """Rotary places of Llama's, by complex numbers: a table up to the free length."""
    z = torch.view_as_complex(x.reshape(x.shape[0], -1, 3, 2))
    return torch.view_as_real(z * _TURNS[: x.shape[0], None]).flatten(2)


def _kernel(x: Tensor) -> Tensor:
    """A diagonal state space's kernel (S4D), of complex rates."""
    w = x[0, :3, :4] + 3
    rates = -torch.exp(w / 9) + 1j * w
    grown = (rates * w[:, :1]).unsqueeze(-1) * torch.arange(x.shape[0])
    weights = torch.view_as_complex(torch.stack([w, w * 2], -1)) / rates
    return (
        torch.einsum("hn, hnl -> hl", weights, torch.exp(0.1 * grown)).real
        * (1 + 2j * x.sum()).imag
    )


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "rfft": lambda x: _parts(fft.rfft(x)),
    "rfft along another axis": lambda x: _parts(fft.rfft(x, n=9, dim=1, norm="ortho")),
    "fft and back": lambda x: _parts(fft.ifft(fft.fft(x) * torch.complex(x, x.sin()))),
    "fnet": lambda x: fft.fft(fft.fft(x, dim=-1), dim=-2).real,
    "fft2": lambda x: fft.fft2(x, norm="forward").real + fft.fftn(x).imag,
    "rfft2": lambda x: fft.irfft2(fft.rfft2(x) * 2, s=x.shape[-2:]),
    "filtered": _filtered,
    "cropped": lambda x: fft.irfft(fft.rfft(x)[..., :3], n=13),
    "lengths": lambda x: (fft.rfft(x).abs() + fft.rfft(x * 0).abs()).log1p(),
    "lengths by Python's abs": lambda x: abs(fft.rfft(x, dim=1)).mean(-1),
    "a complex table": _turned,
    "complex rates": _kernel,
    "angles": lambda x: (fft.rfft(x) + 9).angle(),
    "numbers": lambda x: _parts((torch.exp(torch.complex(x, -x)) / (2 + 1j)) ** 2 - 1j),
    "pairs": lambda x: torch.view_as_real(fft.rfft(x).transpose(1, 2)).sum((1, 2)),
    "casts": lambda x: _parts(x.type(torch.cfloat) * (1j * x).exp().type(torch.cfloat)),
    "polar": lambda x: _parts(torch.polar(x.abs() + 1, x) / torch.complex(x, x + 3)),
    "frames": lambda x: _frames(x.flatten(1)).abs(),
    "frames there and back": lambda x: torch.istft(
        _frames(x.flatten(1)) * 1.5, 16, 4, window=torch.hann_window(16), length=70
    ),
    "short windows": lambda x: torch.view_as_real(
        torch.stft(
            x.flatten(1), 16, 5, 12, torch.hann_window(12), False, normalized=True,
            return_complex=True,
        )
    ),
    "autoformer": lambda x: _auto_correlation(x[:, 0]),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FORMS)
def test_transforms(name: str) -> None:
    assert_as_torch(FORMS[name], lambda n: (_numbers(n, 6, 12),), atol=5e-5)


def test_transforms_over_free_lengths() -> None:
    def run(x: Tensor, weight: Tensor) -> list[Tensor]:
        energy = _frames(x).abs().pow(2).mean(-1)
        return [*_parts(fft.rfft(x)), fft.irfft(fft.rfft(x), n=x.shape[1]), energy * weight]

    assert_as_torch(run, lambda n: (_numbers(2, 24 + n), _numbers(9)), atol=5e-5)


def test_chosen_modes_are_wide_in_the_reference(tmp_path: Path) -> None:
    """What a model makes as ``torch.cfloat`` is complex128 where the reference is float64."""
    linear = torch.nn.Linear(12, 12)
    linear.modes = torch.nn.Parameter(_numbers(4, 4))
    export.train_step(
        linear,
        lambda m, b: _chosen_modes(m(b["x"]), m.modes).pow(2).mean().reshape(1),
        {"x": _numbers(2, 4, 12)},
        optimizer=export.Sgd(0.1),
        dynamic={"x": {0: "batch"}},
        directory=tmp_path / "artifact",
    )
