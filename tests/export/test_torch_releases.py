"""Releases of torch that have something else than the exporter takes of torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch.utils.checkpoint

import export
from export.errors import ExportError
from export.insides import TAKEN, missing
from export.rewrites.patch import patched
from tests.fakes.child_environment import child_environment
from tests.fakes.waiting import PATIENCE_SECONDS


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


LIBRARY = "import export; export.train_step"
COMMAND = "from export.cli import main; main(['mf', '-o', 'made'])"


@pytest.mark.parametrize(
    ("owner", "name", "use"),
    [
        ("torch._subclasses.fake_tensor", "is_fake", LIBRARY),
        pytest.param("torch", "histc", COMMAND, marks=pytest.mark.exhaustive),
        pytest.param(
            "torch.autograd.function.FunctionCtx",
            "save_for_backward",
            LIBRARY,
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("torch", "histc", LIBRARY, marks=pytest.mark.exhaustive),
    ],
)
def test_what_torch_has_no_more_is_told_in_a_sentence(
    owner: str, name: str, use: str, tmp_path: Path
) -> None:
    """Functions, methods and private names are all taken when the exporter is imported."""
    hidden = f"import torch._subclasses.fake_tensor; del {owner}.{name}"
    done = run(f"{hidden}; {use}", tmp_path)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert name in said
    assert f"not what this release was run with (torch {version('torch')}, onnx" in said
    assert said.endswith("pip install --upgrade 'tessera-edge[export]' installs what was")
    if use == COMMAND:
        assert len(done.stderr.splitlines()) == 1


def test_all_that_torch_has_no_more_is_told_at_once(tmp_path: Path) -> None:
    hidden = """
import sys, torch._subclasses.fake_tensor, torch.fx.experimental.proxy_tensor
del torch._subclasses.fake_tensor.is_fake
del torch.fx.experimental.proxy_tensor.fetch_sym_proxy
del sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
"""
    done = run(hidden + LIBRARY, tmp_path)
    said = done.stderr.splitlines()[-1]
    assert f"torch {torch.__version__} has no torch._subclasses.fake_tensor.is_fake, " in said
    assert "torch.fx.experimental.proxy_tensor.fetch_sym_proxy, " in said
    assert "torch.optim.optimizer._global_optimizer_pre_hooks, which the exporter takes" in said
    assert re.search(r"it supports torch[<>=.,\d]*>=2\.13", said)


def _private(tree: ast.AST) -> Iterator[str]:
    """Names of torch's insides: of its private modules, and with an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            private = re.search(r"\._|\.experimental|autograd\.function", node.module or "")
            for alias in node.names:
                if private or alias.name.startswith("_"):
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if private and re.fullmatch(r"(torch|Tensor|functional|proxy_tensor|_VF)\..+", path):
                yield path


def test_what_is_taken_of_torchs_insides_stands_in_one_place() -> None:
    """Other files import it from there; what they reach by a dotted name is looked for there."""
    paths = [*TAKEN, *(name for names in TAKEN.values() for name in names)]
    listed = {part.removesuffix("()") for path in paths for part in path.split(".")}
    for file in sorted(Path(export.__file__).parent.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for name in _private(tree):
            assert name.split(".")[-1] in {*listed, "functions"}, f"{file}: {name}"
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        if file.name != "insides.py":
            assert not list(_private(ast.Module(imports, []))), file
    assert not list(missing(TAKEN))


def test_a_method_of_python_may_become_one_of_cplusplus(tmp_path: Path) -> None:
    """As ``Function.apply`` did in torch 2.14: without torch's own, its base's is found."""
    done = run(
        """
import torch.utils.checkpoint
del torch.autograd.Function.apply
import export

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x
    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors
        return 2 * grad

class Model(torch.nn.Linear):
    def forward(self, x):
        return Doubled.apply(super().forward(x))

export.train_step(
    Model(3, 1), lambda model, batch: model(batch["x"]).square().mean(),
    {"x": torch.randn(4, 3)}, optimizer=export.Sgd(0.1), dynamic={}, directory="made",
)
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made" / "manifest.json").exists()


def test_a_replaced_name_that_torch_has_no_more_is_refused() -> None:
    """What stood for it would be called by nobody."""
    with (
        pytest.raises(
            ExportError, match=r"has no torch\.utils\.checkpoint\._gone, which recording"
        ),
        patched([(torch.utils.checkpoint, "_gone", None)]),
    ):
        raise AssertionError("it was put in place")
