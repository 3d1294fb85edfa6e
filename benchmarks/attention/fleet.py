"""The devices of an experiment: their data, their models' artifacts, and their learners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.datasets.air import CLASSES, FEATURES, load_air, without_features
from benchmarks.datasets.vmnist import load_vmnist
from benchmarks.harness import Artifacts
from device_sdk.artifact.flat_layout import FlatLayout
from export.build import Exported, export_train_step
from export.models.attention_meta import base_layout, export_attention
from export.models.gru_classifier import (
    DYNAMIC,
    GruClassifier,
    classification,
    example_windows,
    export_gru_classifier,
    predicted_classes,
)
from export.optimizers import Optimizer, Sgd


class DigitCnn(nn.Module):
    """[b, 1, 28, 28] float32 to [b, 10] logits; 22,218 parameters.

    Two strided 5 x 5 convolutions of 8 and 16 channels and two linear layers: in the place of
    AlexNet (papers/fedamn, section 4.1), which takes two cores a day there.
    """

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.features = nn.Sequential(
                nn.Conv2d(1, 8, 5, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(8, 16, 5, stride=2, padding=1),
                nn.ReLU(),
            )
            self.classifier = nn.Sequential(nn.Linear(16 * 6 * 6, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def example_digits(*, batch: int = 8, seed: int = 0) -> dict[str, Tensor]:
    """Random ``x`` [b, 1, 28, 28] and ``y`` int64 [b], to trace and verify with."""
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.rand(batch, 1, 28, 28, generator=g),
        "y": torch.randint(10, (batch,), generator=g),
    }


def export_digit_cnn(
    directory: str | Path, *, optimizer: Optimizer | None = None, verify: bool = True
) -> Exported:
    """Write the classifier's artifact: ``Trainer.step({"x": ..., "y": ...})``, any batch size."""
    return export_train_step(
        DigitCnn(),
        classification,
        example_digits(),
        optimizer=optimizer or Sgd(lr=0.05, momentum=0.9),
        dynamic=DYNAMIC,
        predict=predicted_classes,
        directory=directory,
        verify=verify,
        name="digit-cnn",
    )


_HIDDEN = 32
_WIDE = 64
# The same stations lack the same features in each seed's runs of all methods.
_MISSING = 2


class Part(Protocol):
    """Samples and their classes."""

    @property
    def x(self) -> NDArray[np.float32]:
        """[n, ...]."""

    @property
    def y(self) -> NDArray[np.int64]:
        """[n]."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceData:
    """One device: its name, its three sets, its model's width."""

    name: str
    train: Part
    validation: Part
    test: Part
    width: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """Devices and their networks, the narrowest first; ``head`` is the last layer's module."""

    devices: tuple[DeviceData, ...]
    networks: tuple[nn.Module, ...]
    head: str

    @property
    def layouts(self) -> tuple[FlatLayout, ...]:
        """Of each width."""
        return tuple(base_layout(network) for network in self.networks)

    @property
    def initial(self) -> NDArray[np.float32]:
        """The widest network's first parameters, float32 [p]."""
        return self.layouts[-1].flatten(self.parameters(len(self.networks) - 1))

    def parameters(self, width: int) -> Mapping[str, NDArray[Any]]:
        """A network's first parameters by name."""
        return {n: p.detach().numpy() for n, p in self.networks[width].named_parameters()}


def fleet_of(data: str, seed: int, root: Path, only: Sequence[str] = ()) -> Fleet:
    """The fleet of an experiment; raises ValueError for unknown data or devices."""
    if data == "vmnist":
        devices = [
            DeviceData(d.name, d.train, d.validation, d.test)
            for d in load_vmnist(root, np.random.default_rng([seed, 1]))
        ]
        networks: list[nn.Module] = [DigitCnn(seed=seed)]
        head = "classifier.2"
    elif data in ("air", "air-missing", "air-widths"):
        stations = load_air(root)
        if data == "air-missing":
            stations = without_features(stations, _MISSING, np.random.default_rng([seed, 1]))
        wide = data == "air-widths"
        devices = [
            DeviceData(s.name, s.train, s.validation, s.test, i % 2 if wide else 0)
            for i, s in enumerate(stations)
        ]
        sizes = (_HIDDEN, _WIDE) if wide else (_HIDDEN,)
        networks = [GruClassifier(len(FEATURES), h, CLASSES, seed=seed) for h in sizes]
        head = "head"
    else:
        raise ValueError(f"no fleet for {data!r}")
    unknown = set(only) - {device.name for device in devices}
    if unknown:
        raise ValueError(f"{data} has no device {sorted(unknown)[0]!r}")
    kept = tuple(device for device in devices if not only or device.name in only)
    return Fleet(kept, tuple(networks), head)


def export_artifacts(
    artifacts: Artifacts, data: str, width: int, key_scale: float, own_bias: float
) -> tuple[Path, Path]:
    """Folders of the base network's and the meta-network's artifacts, written when missing."""
    kind = data.partition("-")[0]
    network: nn.Module
    if kind == "vmnist":
        network, example = DigitCnn(), example_digits()
    else:
        network = GruClassifier(len(FEATURES), (_HIDDEN, _WIDE)[width], CLASSES)
        example = example_windows(len(FEATURES))

    def base(folder: Path) -> None:
        if kind == "vmnist":
            export_digit_cnn(folder, verify=False)
        else:
            hidden = (_HIDDEN, _WIDE)[width]
            export_gru_classifier(folder, features=len(FEATURES), hidden=hidden, verify=False)

    def meta(folder: Path) -> None:
        export_attention(
            folder,
            network,
            classification,
            example,
            DYNAMIC,
            key_scale=key_scale,
            own_bias=own_bias,
            verify=False,
        )

    described = [kind, width]
    return (
        artifacts.path(described, base),
        artifacts.path([*described, "meta", key_scale, own_bias], meta),
    )
