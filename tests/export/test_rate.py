"""A learning rate that nobody gave: found by a trial on the example batch, and told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk.artifact import load_artifact
from export.cli.inspect import summary


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"])


def _network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), *more, nn.Linear(16, 3))


def _export(
    folder: Path, scale: float = 1.0, model: nn.Module | None = None, **given: Any
) -> export.Exported:
    network = model or _network()
    torch.manual_seed(1)
    return export.train_step(
        network,
        given.pop("loss", _loss),
        {"x": scale * torch.randn(24, 6), "label": torch.arange(24) % 3},
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        directory=folder,
        verify=False,
        **given,
    )


def test_without_an_optimizer_it_is_adam_at_a_rate_by_trial(tmp_path: Path) -> None:
    found = _export(tmp_path / "a").manifest
    assert (found.optimizer.name, found.rate, found.rate_by_trial) == ("adam", 0.01, True)
    assert _export(tmp_path / "b").manifest.graphs == found.graphs
    said = summary(load_artifact(tmp_path / "a"))
    assert "0.01, found by a trial on the example batch" in said


def test_a_rate_by_trial_goes_by_the_scale_of_the_data(tmp_path: Path) -> None:
    near, far = (
        _export(tmp_path / str(scale), scale, optimizer=export.Sgd(momentum=0.5)).manifest.rate
        for scale in (1.0, 100.0)
    )
    assert near is not None and far is not None
    assert near >= 0.03 and far <= near / 100


def test_a_batch_of_one_class_which_takes_any_rate_does_not_lead_to_a_large_one(
    tmp_path: Path,
) -> None:
    def alike(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return _loss(model, {**batch, "label": batch["label"] * 0})

    assert _export(tmp_path / "a", loss=alike).manifest.rate == 0.01


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        (lambda _: export.Sgd(0.5), 0.5),
        (lambda _: export.Adam(lr=1e-3), 1e-3),
        (lambda model: torch.optim.Adam(model.parameters()), 1e-3),
        (lambda _: export.Groups(export.Adam(), export.Group("0.*", {"lr": 0.1})), 1e-3),
        (lambda _: export.Scheduled(export.Adam(), export.schedules.Linear(0.1)), 1e-3),
    ],
)
def test_a_rate_that_was_given_or_is_one_of_several_stays(
    tmp_path: Path, optimizer: Any, rate: float
) -> None:
    model = _network()
    found = _export(tmp_path / "a", model=model, optimizer=optimizer(model)).manifest
    assert (found.rate, found.rate_by_trial) == (rate, False)
    assert f"{rate:g}, the author's" in summary(load_artifact(tmp_path / "a"))


def test_a_loss_that_dropout_shakes_has_a_trial_all_the_same(tmp_path: Path) -> None:
    clipped = export.Clipped(export.Averaged(export.AdamW()), norm=1.0)
    found = _export(tmp_path / "a", model=_network(nn.Dropout(0.3)), optimizer=clipped).manifest
    assert found.rate_by_trial and 0.001 <= (found.rate or 0) <= 0.1


def test_a_loss_that_does_not_fall_leaves_the_optimizers_own_rate(tmp_path: Path) -> None:
    def flat(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return _loss(model, batch) * 0.0

    found = _export(tmp_path / "a", loss=flat, optimizer=export.Sgd()).manifest
    assert (found.rate, found.rate_by_trial) == (0.01, False)


def test_all_rungs_of_a_ladder_have_the_rate_of_the_full_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rungs = export.submodels(
        nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 3)),
        _loss,
        {"x": 30 * torch.randn(24, 6), "label": torch.arange(24) % 3},
        ranks=(1 / 8, 1),
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        directory=tmp_path / "ladder",
        verify=False,
    )
    assert len({(each.manifest.rate, each.manifest.rate_by_trial) for each in rungs}) == 1
    assert rungs[0].manifest.rate_by_trial
