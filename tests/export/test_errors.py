"""What cannot be exported is refused with the operator, the module and a way out."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import export
from export.errors import ExportError


class _Inner(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(self.linear(x))
        return result


def _export(function: Any, directory: Path, **changes: Any) -> export.Exported:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(_Inner(function), nn.Tanh()))
    given: dict[str, Any] = {
        "model": model,
        "loss": lambda m, b: m(b["x"]).pow(2).mean(),
        "example_batch": {"x": torch.randn(6, 4)},
        "optimizer": export.Sgd(0.1),
        "dynamic": {"x": {0: "batch"}},
        "directory": directory / "artifact",
    }
    return export.train_step(**{**given, **changes})


def _until_small(x: Tensor) -> Tensor:
    while x.sum() > 1:
        x = x / 2
    return x


REFUSED = {
    "loop": (_until_small, r"branches on data.*16 ways.*in module: 1\.0.*both ways"),
    "list": (lambda x: [x, -x][int(x.argmax() % 2)], r"depends on data.*1\.0.*torch\.stack"),
    "random": (lambda x: x + torch.poisson(x.exp()), "poisson.*in module: 1.0 .*batch entry"),
    "svd": (lambda x: torch.linalg.svd(x).S, "svd.*in module: 1.0 "),
    "factor": (lambda x: x @ torch.linalg.eigh(x.T @ x)[1], "linalg.*in module: 1.0 "),
    "factor of random numbers": (
        lambda x: x @ torch.linalg.qr(torch.rand(4, 4)).Q,
        "linalg.*in module: 1.0 ",
    ),
    "long fft": (
        lambda x: torch.fft.rfft(x, n=10_000).real,
        "transform of 10000 points.*module: 1",
    ),
    "8 bits": (lambda x: x.to(torch.float8_e5m2).float(), r"float8_e5m2.*module: 1\.0 "),
    "complex": (lambda x: torch.complex(x, x).sin().real, "'sin' of complex.*module: 1.0 .*two"),
    "no gradient": (lambda x: x * (x // 0.3), "floor_divide.*detach"),
    "an axis of a number": (
        lambda x: x * x.sum().index_select(0, torch.zeros(1).long()),
        "not supported.*in module: 1.0 ",
    ),
    "batch fixed": (lambda x: x.reshape(6, 4) * 2, r"size 4\*batch.*module: 1\.0 .*x\.shape"),
    "branch on batch": (lambda x: x * 2 if x.shape[0] > 100 else x, "only where"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    function, message = REFUSED[name]
    with pytest.raises(ExportError, match=message) as caught:
        _export(function, tmp_path)
    assert not (tmp_path / "artifact").exists()
    if caught.value.operator:
        assert caught.value.instead


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": lambda m, b: m(b["x"])}, "not a scalar"),
        ({"loss": lambda m, b: b["x"].mean()}, "does not depend on any parameter"),
        ({"loss": lambda m, b: (m(b["x"]).mean(), [1])}, "dict of tensors"),
        ({"example_batch": {}}, "empty"),
        ({"example_batch": {"x": torch.randn(6, 4).double()}}, "float32"),
        ({"example_batch": {"x": [1.0]}}, "not a tensor"),
        ({"dynamic": {"y": {0: "batch"}}}, "neither a batch tensor nor a parameter"),
        ({"dynamic": {"x": {2: "batch"}}}, "dimension 2"),
        ({"dynamic": {"x": {0: "a b"}}}, "not an axis name"),
        ({"dynamic": {"x": {0: "n"}, "0.weight": {0: "n"}}}, "axis 'n' is"),
        ({"model": nn.Sequential(nn.Tanh())}, "no trainable parameter"),
        ({"model": nn.Linear(4, 4).double()}, "float32 parameters"),
        ({"predict": lambda m, b: m(b["x"])}, "predict returned no dict"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        _export(lambda x: x, tmp_path, **changes)
    assert not (tmp_path / "artifact").exists()


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match=r"thesis\.txt"):
        _export(lambda x: x, tmp_path)
    assert (tmp_path / "artifact" / "thesis.txt").read_text() == "years of work"


def test_exporting_again_replaces_the_artifact(tmp_path: Path) -> None:
    first = _export(lambda x: x, tmp_path)
    second = _export(lambda x: x * 2, tmp_path)
    assert first.id != second.id
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["artifact"]


def test_verification_catches_a_wrong_lowering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sign error in one operator's lowering must not become an artifact."""
    from export.lowering import registry

    operator = torch.ops.aten.sin.default
    monkeypatch.setitem(registry._TABLE, operator, lambda g, out, a: g.op("Cos", a))
    with pytest.raises(ExportError, match=r"differs from torch: .* is off by"):
        _export(torch.sin, tmp_path)
    assert not (tmp_path / "artifact").exists()


def test_the_users_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _export(lambda x: x, tmp_path, model=model)
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert nn.functional.dropout.__module__ == "torch.nn.functional"


def test_a_prediction_that_writes_into_a_parameter_is_refused(tmp_path: Path) -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                self.linear.weight.data.clamp_(-0.1, 0.1)
            result: torch.Tensor = self.linear(x)
            return result

    with pytest.raises(ExportError, match=r"writes into its own parameters.*clamp_.*Clipped"):
        _export(lambda x: x, tmp_path, model=nn.Sequential(Clipped()))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), "lazy module"),
        (lambda: torch.compile(nn.Linear(4, 3)), "compiled.*before torch.compile"),
        (lambda: torch.jit.script(nn.Linear(4, 3)), "scripted"),
        (lambda: nn.Linear(4, 3, device="meta"), "is on meta"),
    ],
)
def test_modules_that_cannot_be_read(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        _export(lambda x: x, tmp_path, model=model())


def test_a_batch_on_which_torch_itself_fails_is_named_as_the_cause(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = model(batch["x"]).masked_fill(batch["x"][:, :1] < 9, float("-inf"))
        return hidden.softmax(-1).mean()

    with pytest.raises(ExportError, match="torch itself computes a loss that is not finite"):
        _export(lambda x: x, tmp_path, loss=loss)


def test_a_buffer_that_changes_its_shape_is_refused(tmp_path: Path) -> None:
    class Growing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, torch.zeros(1)])
            return super().forward(x)

    with pytest.raises(ExportError, match=r"'seen' to \[2\]"):
        _export(lambda x: x, tmp_path, model=Growing())


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (torch.optim.Adam, "Adam(model.parameters(), lr=...)"),
        ("adam", "export.AdamW(lr=...)"),
        (export.Adam, "Adam(lr=...)"),
        (export.Sgd, "Sgd(lr=...)"),
    ],
)
def test_what_is_no_optimizer_is_refused_and_ours_is_named(
    given: Any, instead: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=f"optimizer is .*instead: {re.escape(instead)}"):
        _export(lambda x: x, tmp_path, optimizer=given)


def test_numbers_drawn_beside_torch(tmp_path: Path) -> None:
    """One draw would be the graph's for ever; one that changes nothing is only said."""

    def mixed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).mean() * float(np.random.beta(0.4, 0.4))

    def dropped(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        kept = random.random() >= 0.3
        return model(batch["x"] if kept else -batch["x"]).mean()

    def idle(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"] if random.random() >= 0 else -batch["x"]).mean()

    def exported(loss: Any) -> None:
        export.train_step(
            nn.Linear(2, 1), loss, {"x": torch.randn(3, 2)}, optimizer=export.Sgd(0.1),
            dynamic={}, directory=tmp_path / "artifact", verify=False,
        )  # fmt: skip

    for loss in (mixed, dropped):
        with pytest.raises(ExportError, match=r"Python's random or numpy.random.*torch\.rand"):
            exported(loss)
    with pytest.warns(UserWarning, match="one draw for ever"):
        exported(idle)


def _scored(m: nn.Module, b: dict[str, Tensor], score: Any) -> Tensor:
    result: Tensor = score(m(b["x"]), b["x"])
    return result.sum()


def _halved(z: Tensor, x: Tensor) -> Tensor:
    if x.shape[0] > 100:
        return z / 2
    return z


@pytest.mark.parametrize(
    ("score", "line"),
    [
        (lambda z, x: z + torch.special.bessel_j0(x), "special.bessel_j0"),
        (lambda z, x: z * [1, 2][int(z.sum() > 0)], "z.sum"),
        (lambda z, x: z.reshape(6, 4), "z.reshape"),
        (lambda z, x: next(iter(z)), "next.iter"),
        (_halved, r"if x.shape\[0\] > 100"),
    ],
)
def test_the_line_in_the_loss_is_named(score: Any, line: str, tmp_path: Path) -> None:
    """And no module that happens to have run before."""
    with pytest.raises(ExportError, match=rf"at test_errors\.py:\d+: .*{line}") as caught:
        _export(lambda x: x, tmp_path, loss=lambda m, b: _scored(m, b, score))
    assert caught.value.module in ("", "none (the loss or predict= itself)")


def test_a_gradient_is_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from export.lowering import registry

    monkeypatch.delitem(registry._TABLE, torch.ops.aten.cos.default)
    with pytest.raises(ExportError, match=r"aten\.cos.*module: 1\.0 \(_Inner\); at test_errors"):
        _export(torch.sin, tmp_path)
