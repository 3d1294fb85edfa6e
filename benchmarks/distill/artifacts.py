"""The click models' artifacts, exported once a process for the runs that share them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from torch import Tensor, nn

import export
from benchmarks.distill.experiment import ModelChoice
from device_sdk.trainer import Trainer
from export.losses import cross_entropy
from export.models.click import click_model, example_clicks, export_click, predicted_clicks
from export.models.fields import Fields

_TEACHING = ("teacher", "has_teacher", "weight_ce", "weight_teacher", "weight_kl", "l2")


def click_fields(sizes: tuple[tuple[str, int], ...]) -> Fields:
    """The fields of ``benchmarks.datasets.click``."""
    return Fields(
        categorical=sizes, multi_valued=(("genres", 18),), numeric=("year",), history="movie"
    )


class ArtifactShelf:
    """Exports into ``folder``, each artifact when it is first asked for."""

    def __init__(self, folder: Path, fields: Fields) -> None:
        self._folder = folder
        self._fields = fields

    def trainer(self, choice: ModelChoice, seed: int, *, teaching: bool) -> Trainer:
        """A fresh trainer on one CPU thread.

        ``teaching``: with the distillation loss; else plain cross-entropy, for FedAvg.
        """
        described = json.dumps([asdict(choice), seed, teaching], sort_keys=True)
        folder = self._folder / hashlib.sha256(described.encode()).hexdigest()[:16]
        if not folder.exists():
            if teaching:
                self._export_teaching(folder, choice, seed)
            else:
                self._export_plain(folder, choice, seed)
        return Trainer(folder, providers="cpu", threads=1)

    def _export_teaching(self, folder: Path, choice: ModelChoice, seed: int) -> None:
        export_click(
            folder,
            choice.network,
            fields=self._fields,
            dim=choice.dim,
            attention=choice.attention,
            seed=seed,
            optimizer=_optimizer(choice),
            verify=False,  # these graphs are verified by the exporter's tests
        )

    def _export_plain(self, folder: Path, choice: ModelChoice, seed: int) -> None:
        model = click_model(
            choice.network,
            fields=self._fields,
            dim=choice.dim,
            attention=choice.attention,
            seed=seed,
        )
        entries = example_clicks(choice.network, fields=self._fields)
        batch = {name: value for name, value in entries.items() if name not in _TEACHING}
        dynamic = {name: {0: "batch"} for name in batch}
        if "history" in dynamic:
            dynamic["history"] = {0: "batch", 1: "past"}
        export.train_step(
            model,
            _labels_alone,
            batch,
            optimizer=_optimizer(choice),
            dynamic=dynamic,
            predict=predicted_clicks,
            directory=folder,
            verify=False,
        )


def _labels_alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch), batch["label"])


def _optimizer(choice: ModelChoice) -> export.Optimizer:
    if choice.optimizer == "adam":
        return export.Adam(lr=choice.learning_rate)
    if choice.optimizer == "sgd":
        return export.Sgd(lr=choice.learning_rate)
    return export.Segmented(
        lr=choice.learning_rate,
        window=choice.window,
        mu1=choice.mu1,
        sigma=choice.sigma,
        xi=choice.xi,
    )
