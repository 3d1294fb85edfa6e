"""Groups of parameters, torch's optimizers taken over, and what the artifact then holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import export
from device_sdk import Trainer
from export import schedules
from export.errors import ExportError
from tests.export.conftest import WithoutBfloat16


def _model() -> nn.Sequential:
    """Matrices, biases, a norm, and one weight above the limit of packs."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 9000), nn.Tanh(),
        nn.Linear(9000, 2),
    )  # fmt: skip


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).pow(2).mean()


def _batch(rows: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 6, generator=draw), "y": torch.randn(rows, 2, generator=draw)}


def _export(model: nn.Module, optimizer: Any, folder: Path, **more: Any) -> export.Exported:
    dynamic = {"x": {0: "batch"}, "y": {0: "batch"}}
    return export.train_step(
        model, _loss, _batch(5, 0), optimizer=optimizer, dynamic=dynamic, directory=folder, **more
    )


def _assert_trains_alike(
    trainer: Trainer, model: nn.Module, optimizer: Any, steps: int = 6, **hyper: Any
) -> None:
    """Beside torch, which ``optimizer`` may be a function for: called after each backward."""
    for step in range(steps):
        batch = _batch(4 + step % 3, step)
        model.zero_grad()
        loss = _loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step() if isinstance(optimizer, torch.optim.Optimizer) else optimizer()
        got = trainer.step({k: v.numpy() for k, v in batch.items()}, **hyper)
        assert got == pytest.approx(loss.item(), rel=1e-3)
    held = trainer.parameters
    for name, value in model.named_parameters():
        if name in held:
            np.testing.assert_allclose(held[name], value.detach(), rtol=2e-3, atol=2e-5)


def test_around_one_of_torchs(tmp_path: Path) -> None:
    """Clipping and a schedule go around torch's own as around its equal of ours."""
    model = _model()
    groups = [{"params": model[3].parameters()}, {"params": model[5].parameters(), "lr": 1e-2}]
    theirs = export.Clipped(torch.optim.AdamW(groups, lr=1e-3), norm=1.0)
    exported = _export(model, export.Scheduled(theirs, export.schedules.Cosine(9)), tmp_path / "a")
    settings = dict(exported.manifest.optimizer.settings)
    assert settings["clipped.norm"] == 1.0 and settings["scheduled"] == "cosine"
    assert "0.weight" not in Trainer(exported.directory).parameters


def test_torchs_optimizer_with_groups_is_taken_over(tmp_path: Path) -> None:
    """No decay on biases and norms, a rate of its own for the head, and a backbone left alone."""
    model = _model()
    flat = [p for n, p in model.named_parameters() if p.dim() < 2 and not n.startswith("5")]
    theirs = torch.optim.AdamW(
        [
            {"params": [model[3].weight]},
            {"params": flat, "weight_decay": 0.0},
            {"params": model[5].parameters(), "lr": 1e-2, "betas": (0.5, 0.9)},
        ],
        lr=torch.tensor(1e-3),
        weight_decay=0.5,
    )
    exported = _export(model, theirs, tmp_path / "a")
    settings = dict(exported.manifest.optimizer.settings)
    assert settings["1.parameters"] == ("0.bias", "1.weight", "1.bias", "3.bias")
    assert (settings["rest.weight_decay"], settings["1.weight_decay"]) == (0.5, 0.0)
    assert (settings["2.rate"], settings["2.betas"]) == (pytest.approx(10), (0.5, 0.9))
    trainer = Trainer(exported.directory)
    # What torch's optimizer was not given does not move, and has no state.
    assert "0.weight" not in trainer.parameters and "0.weight" in trainer.buffers
    _assert_trains_alike(trainer, model, theirs)


@pytest.mark.parametrize(
    ("make", "ours"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.1),
         export.Sgd(0.1, 0.9, weight_decay=0.1, nesterov=True)),
        (lambda p: torch.optim.Adam(p, amsgrad=True), export.Adam(amsgrad=True)),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True),
         export.Adam(weight_decay=0.1, decoupled_weight_decay=True)),
        (lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9)), export.AdamW(betas=(0.8, 0.9))),
        (lambda p: torch.optim.RMSprop(p, centered=True), export.RMSprop(centered=True)),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), export.Adagrad(lr_decay=0.1)),
        (lambda p: torch.optim.Adadelta(p, rho=0.5), export.Adadelta(rho=0.5)),
        (lambda p: torch.optim.Muon([p[0]], momentum=0.5), export.Muon(momentum=0.5)),
    ],
)  # fmt: skip
def test_which_of_ours_is_torchs(make: Any, ours: Any) -> None:
    from export.optimizers.traced import as_optimizer

    model = nn.Linear(3, 2)
    assert as_optimizer(make(list(model.parameters())), model) == ours


def test_torchs_optimizers_that_cannot_be_taken_over(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 2))
    scheduled = torch.optim.SGD(model.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 3)
    for given, message in [
        (scheduled, r"a torch scheduler .*instead: export\.Scheduled"),
        (torch.optim.SGD(nn.Linear(3, 3).parameters(), 0.1), "none of the model's"),
        (
            torch.optim.SGD(model.parameters(), 0.1, momentum=1.0),
            "momentum is 1.0; expected 0 <= momentum < 1",
        ),
    ]:
        with pytest.raises(ExportError, match=message):
            _export(model, given, tmp_path / "a")


def test_muon_is_a_group(tmp_path: Path) -> None:
    """Matrices packed and alone by Muon, the rest by AdamW, clipped together, by one base rate."""
    model = _model()
    ours = export.Clipped(
        export.Groups(
            export.AdamW(1e-3),
            export.Group(lambda name, shape: len(shape) == 2, export.Muon(2e-2)),
        ),
        norm=0.5,
    )
    trainer = Trainer(_export(model, ours, tmp_path / "a").directory)
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 4e-2)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], 2e-3)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with WithoutBfloat16():
            muon.step()
        adamw.step()

    assert trainer.hyper == {"lr": pytest.approx(1e-3)}
    _assert_trains_alike(trainer, model, step, hyper={"lr": 2e-3})


def test_a_group_with_a_name_is_frozen_later(tmp_path: Path) -> None:
    groups = export.Groups(
        export.AdamW(1e-2), export.Group("0.*", {"lr": 5e-3}, name="stem"),
        export.Group(["3.bias", "5.bias"], export.Sgd(0.0)),
    )  # fmt: skip
    trainer = Trainer(_export(_model(), groups, tmp_path / "a").directory)
    assert trainer.hyper == {"lr": pytest.approx(1e-2), "stem.lr": pytest.approx(5e-3)}
    batch = {k: v.numpy() for k, v in _batch(4, 1).items()}
    first = trainer.parameters
    trainer.step(batch)
    second = trainer.parameters
    trainer.step(batch, hyper={"stem.lr": 0.0, "lr": 0.1})
    third = trainer.parameters
    for name in first:
        stem, never = name.startswith("0."), name in ("3.bias", "5.bias")
        assert np.array_equal(first[name], second[name]) == never, name
        assert np.array_equal(second[name], third[name]) == (never or stem), name


def test_accumulation_average_and_schedule_beside_torch(tmp_path: Path) -> None:
    """All combinators around groups; the average is restored from a checkpoint and predicts."""
    model = _model()
    decay = lambda name, shape: len(shape) < 2  # noqa: E731
    ours = export.Averaged(
        export.Accumulated(
            export.Scheduled(
                export.Groups(export.AdamW(1e-2), export.Group(decay, {"weight_decay": 0.0})),
                schedules.Sequential((schedules.Linear(0.1), schedules.Exponential(0.9)), (2,)),
            ),
            every=2,
        ),
        decay=0.8,
    )
    predict = lambda m, b: {"out": m(b["x"])}  # noqa: E731
    trainer = Trainer(_export(model, ours, tmp_path / "a", predict=predict).directory)
    theirs = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        1e-2,
    )
    lrs = torch.optim.lr_scheduler
    scheduler = lrs.SequentialLR(
        theirs, [lrs.LinearLR(theirs, 0.1), lrs.ExponentialLR(theirs, 0.9)], [2]
    )
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    )
    average.update_parameters(model)
    count, total = 0, [torch.zeros_like(p) for p in model.parameters()]

    def step() -> None:
        nonlocal count
        count += 1
        for held, p in zip(total, model.parameters(), strict=True):
            assert p.grad is not None
            held += p.grad / 2
        if count % 2 == 0:
            for held, p in zip(total, model.parameters(), strict=True):
                p.grad = held.clone()
                held.zero_()
            theirs.step()
            scheduler.step()
        average.update_parameters(model)

    for name, value in trainer.averages.items():
        np.testing.assert_array_equal(value, trainer.parameters[name])
    _assert_trains_alike(trainer, model, step, steps=11)
    trainer.save(tmp_path / "checkpoint")
    again = Trainer(tmp_path / "a")
    again.restore(tmp_path / "checkpoint")
    for name, value in average.module.named_parameters():
        got = again.averages[name]
        np.testing.assert_allclose(got, value.detach(), rtol=2e-3, atol=2e-5)
        assert not np.array_equal(got, again.parameters[name])
    x = _batch(4, 9)["x"]
    with torch.no_grad():
        wanted = average.module(x).numpy()
    got = again.predict({"x": x.numpy()}, averaged=True)["out"]
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)
    assert not np.allclose(again.predict({"x": x.numpy()})["out"], got, atol=1e-4)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([export.Group("heads.*", {})], "no parameter is called 'heads.*'; there are 0.weight"),
        ([export.Group("0.*", {}), export.Group("0.bias", {})], "group '2' is left without"),
        ([export.Group(lambda name, shape: False, {}, name="a")], "group 'a' chooses no"),
        ([export.Group("0.bias", export.Muon())], "Muon does not train '0.bias' of shape"),
    ],
)
def test_groups_that_do_not_fit_the_model(groups: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        _export(nn.Sequential(nn.Linear(6, 2)), export.Groups(export.Sgd(), *groups), tmp_path)


def test_groups_inside_groups(tmp_path: Path) -> None:
    inner = export.Groups(export.Lamb(1e-2), export.Group("*.bias", export.Lion(1e-3)))
    outer = export.Groups(export.RMSprop(1e-3), export.Group(["3.*", "5.*"], inner, name="top"))
    exported = _export(_model(), outer, tmp_path / "a")
    held = {tensor.name for tensor in exported.manifest.state}
    assert {"packed", "packed.top", "packed.top.1", "3.weight"} <= held
    assert {
        "groups.rest.square_avg.packed",
        "groups.top.rest.m.3.weight",
        "groups.top.1.m.packed.top.1",
    } <= held
    assert Trainer(tmp_path / "a").hyper.keys() == {"lr", "top.lr"}


def test_a_group_inside_the_rest_is_its_own(tmp_path: Path) -> None:
    """Also where the groups around it have one in the same place."""
    inner = export.Groups(export.Sgd(0.1), export.Group("3.bias", export.Sgd(0.01)))
    outer = export.Groups(inner, export.Group("0.bias", export.Sgd(0.001)))
    model = _model()
    _export(model, outer, tmp_path / "a", verify=False)
    rates = {"3.bias": 0.01, "0.bias": 0.001}
    groups = [{"params": [p], "lr": rates.get(n, 0.1)} for n, p in model.named_parameters()]
    _assert_trains_alike(Trainer(tmp_path / "a"), model, torch.optim.SGD(groups), steps=2)


def test_a_wrong_step_long_after_the_first_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation moves parameters after more steps than verification trains."""
    from export.lowering import registry

    remainder = torch.ops.aten.remainder.Scalar
    right = registry._TABLE[remainder]
    monkeypatch.setitem(registry._TABLE, remainder, lambda g, out, a, b: right(g, out, a, b + 1))
    with pytest.raises(ExportError, match=r"differs from torch.* at step 6"):
        _export(nn.Sequential(nn.Linear(6, 2)), export.Accumulated(export.Sgd(), 7), tmp_path / "a")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adamax", "ASGD", "Adafactor", "Rprop"])
def test_torchs_rarer_optimizers_are_taken_over(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    head = {"params": model[2].parameters(), "lr": 0.03}
    optimizer = getattr(torch.optim, name)([{"params": model[0].parameters()}, head], lr=0.01)

    def loss(m: torch.nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return (m(b["x"]) - b["y"]).square().mean()

    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 2)}
    exported = export.train_step(
        model, loss, batch, optimizer=optimizer,
        dynamic={key: {0: "batch"} for key in batch}, directory=tmp_path / "artifact",
    )  # fmt: skip
    trainer = Trainer(exported.directory)
    for _ in range(8):
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        got = trainer.step({key: each.numpy() for key, each in batch.items()})
        assert got == pytest.approx(value.item(), rel=1e-4)
    for key, parameter in model.named_parameters():
        got = torch.from_numpy(trainer.parameters[key])
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-3, atol=1e-5)
