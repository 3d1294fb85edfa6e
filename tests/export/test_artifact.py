"""What an exported folder holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import export
from device_sdk import Trainer
from device_sdk.artifact import load_artifact
from device_sdk.errors import BatchError, NonFiniteStep
from export.cli import main
from export.models.mf import example_batch, mf_recipe
from export.optimizers.combinators import Around

SHIPPED = Path(__file__).parents[2] / "device_sdk" / "artifacts" / "mf"


def test_the_shipped_factorisation_is_what_export_makes(tmp_path: Path) -> None:
    exported = mf_recipe().export(tmp_path / "mf")
    shipped = load_artifact(SHIPPED).manifest
    made = exported.manifest
    assert made.files == shipped.files, "run `make artifact`: the exporter's result has changed"
    assert made.graphs == shipped.graphs and made.state == shipped.state


def test_one_factorisation_artifact_serves_every_size(tmp_path: Path) -> None:
    """The same folder, at several k, item counts and batch sizes, against the closed form."""
    trainer = Trainer(SHIPPED)
    rng = np.random.default_rng(5)
    for users, items, k, triples in [(1, 5, 1, 1), (3, 40, 7, 11), (2, 900, 64, 300)]:
        u = rng.normal(0, 0.3, (users, k)).astype(np.float32)
        v = rng.normal(0, 0.3, (items, k)).astype(np.float32)
        trainer.set_parameters({"users.weight": u, "items.weight": v})
        batch = {n: t.numpy() for n, t in example_batch(users, items, triples, seed=k).items()}
        loss = trainer.step(batch, hyper={"lr": 0.1})
        wide = {n: np.asarray(value, dtype=np.float64) for n, value in batch.items()}
        at, pos, neg = batch["user"], batch["positive"], batch["negative"]
        ud, vd = u.astype(np.float64), v.astype(np.float64)
        gap = vd[pos] - vd[neg]
        margin = (ud[at] * gap).sum(1) + wide["offset"]
        norms = 0.5 * wide["l2_users"] * (ud[at] ** 2).sum(1) + 0.5 * wide["l2_items"] * (
            vd[pos] ** 2 + vd[neg] ** 2
        ).sum(1)
        assert loss == pytest.approx(
            (wide["weight"] * (np.logaddexp(0, -margin) + norms)).sum(), rel=1e-5
        )
        w = wide["weight"][:, None]
        s = w / (1 + np.exp(margin))[:, None]
        gu, gv = np.zeros_like(ud), np.zeros_like(vd)
        np.add.at(gu, at, wide["l2_users"] * w * ud[at] - s * gap)
        np.add.at(gv, pos, wide["l2_items"] * w * vd[pos] - s * ud[at])
        np.add.at(gv, neg, wide["l2_items"] * w * vd[neg] + s * ud[at])
        new = trainer.parameters
        np.testing.assert_allclose(
            new["users.weight"], ud - 0.1 * wide["rate_users"] * gu, atol=2e-6
        )
        np.testing.assert_allclose(
            new["items.weight"], vd - 0.1 * wide["rate_items"] * gv, atol=2e-6
        )
        np.testing.assert_allclose(
            trainer.predict({})["scores"], new["users.weight"] @ new["items.weight"].T, atol=1e-5
        )


def test_graphs_are_default_domain_and_pass_the_checker() -> None:
    for name in ("train.onnx", "infer.onnx"):
        model = onnx.load(SHIPPED / name)
        onnx.checker.check_model(model, full_check=True)
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 20)]
        assert all(node.domain == "" for node in model.graph.node)
        assert not model.functions
    assert json.loads((SHIPPED / "manifest.json").read_bytes())["opset"] == 20


def _dropout_artifact(folder: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    export.train_step(
        model,
        lambda m, b: (m(b["x"]) ** 2).mean(),
        {"x": torch.randn(8, 4)},
        optimizer=export.Sgd(0.01),
        dynamic={"x": {0: "batch"}},
        directory=folder,
    )
    return folder


def test_dropout_is_reproducible_from_its_seed(tmp_path: Path) -> None:
    folder = _dropout_artifact(tmp_path / "dropout")
    x = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}
    runs = []
    for seed in (1, 1, 2):
        trainer = Trainer(folder, seed=seed, threads=2)
        runs.append([trainer.step(x) for _ in range(4)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len(set(runs[0])) == 4


def test_dropout_keeps_the_share_that_was_asked_for() -> None:
    from export.rewrites.randomness import Randomness

    shares = []
    for seed in range(4):
        draw = Randomness(torch.tensor(seed), torch.tensor(seed * 7))
        for _ in range(3):
            mask = draw.keep_mask([20_000], 0.7)
            shares.append(mask.float().mean().item())
            pairs = (mask[1:] & mask[:-1]).float().mean().item()
            assert pairs == pytest.approx(0.49, abs=0.02)
    assert np.mean(shares) == pytest.approx(0.7, abs=0.005)
    assert len(set(shares)) > 6


def test_adams_tiny_epsilon_survives(tmp_path: Path) -> None:
    """The usual optimizer of converters drops x + 1e-8; a zero gradient then gives 0 / 0."""
    model = nn.Embedding(4, 3)
    export.train_step(
        model,
        lambda m, b: (m(b["i"]) ** 2).mean(),
        {"i": torch.tensor([0, 1, 1])},
        optimizer=export.Adam(0.1),
        dynamic={"i": {0: "batch"}},
        directory=tmp_path / "embedding",
    )
    trainer = Trainer(tmp_path / "embedding")
    before = trainer.parameters["weight"]
    trainer.step({"i": np.array([0, 0])})
    after = trainer.parameters["weight"]
    assert np.isfinite(after).all()
    np.testing.assert_array_equal(after[1:], before[1:])
    np.testing.assert_allclose(np.abs(after[0] - before[0]), 0.1, rtol=1e-3)


@pytest.mark.parametrize(
    "optimizer",
    [
        export.Sgd(0.1, momentum=0.9),
        export.Adam(0.1),
        export.RMSprop(0.1, centered=True, momentum=0.9),
        export.Adadelta(),
        export.Clipped(export.Lion(0.1), norm=1.0),
        export.Averaged(export.Accumulated(export.Clipped(export.Lamb(0.1), value=1.0), 3)),
        export.Groups(export.Adagrad(0.1), export.Group("weight", export.Muon())),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_whatever_is_not_finite_is_caught(optimizer: export.Optimizer, tmp_path: Path) -> None:
    """Also where only the optimizer's state would remember it, as with a squared gradient."""
    torch.manual_seed(0)
    export.train_step(
        nn.Linear(3, 1),
        lambda m, b: (m(b["x"]) * b["scale"]).mean(),
        {"x": torch.randn(4, 3), "scale": torch.tensor(1.0)},
        optimizer=optimizer,
        dynamic={"x": {0: "batch"}},
        directory=tmp_path / "linear",
    )
    trainer = Trainer(tmp_path / "linear")
    x = np.ones((4, 3), dtype=np.float32)
    trainer.step({"x": x, "scale": np.ones((), np.float32)})
    before = trainer.state
    for scale in (np.nan, np.inf, -np.inf, 3e38, 1e25):
        batch = {"x": x * np.float32(3), "scale": np.asarray(scale, dtype=np.float32)}
        if (optimizer.name == "sgd" or isinstance(optimizer, Around)) and scale == 1e25:
            continue  # large, but every number of the new state is finite
        with pytest.raises(NonFiniteStep):
            trainer.step(batch)
        for name, value in trainer.state.items():
            np.testing.assert_array_equal(value, before[name], err_msg=f"{name} at {scale}")
    trainer.step({"x": x, "scale": np.ones((), np.float32)})
    assert all(np.isfinite(value).all() for value in trainer.state.values())


@pytest.mark.parametrize(
    "optimizer",
    [
        export.Lion(0.1),
        export.Clipped(export.Sgd(0.1), value=1.0),
        export.Clipped(export.Sgd(), norm=1.0),
    ],
    ids=["a sign", "a clamp", "a norm"],
)
def test_a_gradient_of_nan_is_caught_where_the_loss_is_finite(
    optimizer: export.Optimizer, tmp_path: Path
) -> None:
    model = nn.Linear(3, 1, bias=False)
    export.train_step(
        model,
        lambda m, b: m(b["x"]).pow(2).sum().sqrt(),
        {"x": torch.randn(4, 3)},
        optimizer=optimizer,
        dynamic={"x": {0: "batch"}},
        directory=tmp_path / "linear",
    )
    trainer = Trainer(tmp_path / "linear")
    with pytest.raises(NonFiniteStep):
        trainer.step({"x": np.zeros((2, 3), np.float32)})


def test_parity_with_torchs_own_optimizers_over_a_run(tmp_path: Path) -> None:
    """The Trainer beside torch.optim on a smooth model: state carry-over, not only one step."""
    torch.manual_seed(1)
    for ours, theirs in [
        (export.Sgd(0.05, momentum=0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
        (export.Adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
        (
            export.Adam(0.01, weight_decay=0.1, amsgrad=True),
            lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, amsgrad=True),
        ),
        (
            export.Sgd(0.05, 0.9, weight_decay=0.01, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.01, nesterov=True),
        ),
        (
            export.AdamW(0.01, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
        ),
    ]:
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3))
        folder = tmp_path / f"{ours.name}-{len(list(tmp_path.iterdir()))}"
        x, y = torch.randn(32, 5), torch.randint(3, (32,))
        export.train_step(
            model,
            lambda m, b: export.losses.cross_entropy(m(b["x"]), b["y"]),
            {"x": x, "y": y},
            optimizer=ours,
            dynamic={"x": {0: "batch"}, "y": {0: "batch"}},
            directory=folder,
        )
        trainer = Trainer(folder)
        wide = model.double()
        optimizer = theirs(wide.parameters())
        for step in range(30):
            rows = torch.randperm(32)[: 20 + step % 7]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wide(x[rows].double()), y[rows])
            loss.backward()
            optimizer.step()
            got = trainer.step({"x": x[rows].numpy(), "y": y[rows].numpy()})
            assert got == pytest.approx(loss.item(), rel=1e-4)
        for name, value in wide.state_dict().items():
            held = {**trainer.parameters, **trainer.buffers}[name]
            np.testing.assert_allclose(held, value.numpy(), rtol=2e-3, atol=2e-4, err_msg=name)


def test_entries_that_nothing_uses_are_ignored_and_others_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch as the data set gives it: with an entry that neither loss nor prediction reads."""
    exported = export.train_step(
        nn.Linear(3, 1),
        lambda m, b: (m(b["x"]) - b["y"]).pow(2).mean(),
        {"x": torch.randn(4, 3), "y": torch.randn(4, 1), "row": torch.arange(4)},
        optimizer=export.Sgd(),
        dynamic={name: {0: "batch"} for name in ("x", "y", "row")},
        predict=lambda m, b: {"out": m(b["x"])},
        directory=tmp_path / "linear",
    )
    assert exported.manifest.ignored == ("row",)
    trainer = Trainer(exported.directory)
    x, y = np.ones((2, 3), np.float32), np.ones((2, 1), np.float32)
    losses = [trainer.step({"x": x, "y": y, "row": np.arange(2)}) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert len([said for said in caplog.messages if said.startswith("row: ignored")]) == 1
    trainer.step({"x": x, "y": y})
    trainer.predict({"x": x, "y": y, "row": np.arange(2)})
    with pytest.raises(BatchError, match=r"'rows' is unknown.*expects {x.*ignores row"):
        trainer.step({"x": x, "y": y, "rows": np.arange(2)})


def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mymodels.py").write_text(
        "import torch, export\n"
        "def tiny():\n"
        "    return dict(model=torch.nn.Linear(3, 2),\n"
        "        loss=lambda m, b: (m(b['x']) ** 2).mean(),\n"
        "        example_batch={'x': torch.randn(4, 3)}, optimizer=export.Sgd(),\n"
        "        dynamic={'x': {0: 'batch'}})\n"
        "def wrong():\n"
        "    return {'model': 1, 'colour': 2}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["build", "mymodels:tiny", "-o", "tiny"]) == 0
    assert "verified beside torch" in capsys.readouterr().out
    assert main(["inspect", "tiny"]) == 0
    printed = capsys.readouterr().out
    for part in ("weight", "batch", "Gemm", "sgd(", "hyper", "opset"):
        assert part in printed, part
    assert main(["inspect", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "tiny"
    assert main(["operators"]) == 0
    assert "aten.addmm.default" in capsys.readouterr().out
    for reference, message in [
        ("mymodels:wrong", "unknown keys \\['colour'\\]"),
        ("mymodels:absent", "one of: tiny, wrong"),
        ("nowhere:tiny", "no module 'nowhere'"),
        ("mymodels", "PACKAGE.MODULE:FUNCTION"),
    ]:
        assert main(["build", reference, "-o", "x"]) == 1
        import re

        assert re.search(message, capsys.readouterr().err)
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err
