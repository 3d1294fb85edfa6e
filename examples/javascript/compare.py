"""The same 50 steps in Python, in Node and in Chromium: how far apart is the state afterwards?

    python -m examples.javascript.compare

Four artifacts are exported and trained on made-up rows. Printed is the largest difference of any
element of the state, the optimizer's part included, from what Python's Trainer has.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import device_sdk
import export
from device_sdk.artifact import safetensors
from device_sdk.artifact.parts import resolve
from examples.javascript.chromium import Page
from export.models.gru_classifier import GruClassifier, gru_recipe

HERE: Final = Path(__file__).parent
STEPS: Final = 50
SEED: Final = 7
ROWS: Final = 16
"""A batch's. There are fewer batches than steps, so that rows come again."""
BATCHES: Final = 20
SECONDS: Final = 120.0
Arrays = Mapping[str, NDArray[Any]]

# -- the artifacts ---------------------------------------------------------------------------------


def _classes(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    return export.losses.cross_entropy(logits, batch["y"]), {"logits": logits}


def export_classes(model: nn.Module, x: Tensor, optimizer: Any, folder: Path) -> None:
    """Export a classifier of four classes, of which ``x`` is a batch."""
    free = {0: "batch"}
    export.train_step(
        model,
        _classes,
        {"x": x, "y": torch.arange(len(x)) % 4},
        optimizer=optimizer,
        dynamic={"x": free, "y": free},
        directory=folder,
    )


def perceptron(folder: Path) -> None:
    """An MLP with dropout, by Adam."""
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 4))
    export_classes(model, torch.randn(ROWS, 24), export.Adam(lr=1e-3), folder)


def convolutions(folder: Path) -> None:
    """A CNN with batch norm, by SGD with momentum."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4)),
    )
    export_classes(model, torch.randn(ROWS, 1, 12, 12), export.Sgd(lr=0.02, momentum=0.9), folder)


def recurrent(folder: Path) -> None:
    """A GRU over windows of measurements, by SGD with momentum."""
    gru_recipe(GruClassifier(6, 16, 4), hours=12).export(folder)


def adapters(folder: Path) -> None:
    """Adapters of rank 4 on a frozen transformer layer behind an embedding, by AdamW."""
    base = nn.Sequential(
        nn.Embedding(100, 32),
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True),
        nn.Flatten(),
        nn.Linear(320, 4),
    )
    adapted = export.lora(base, 4, layers=("1",), trained=("3",))
    export_classes(adapted, torch.randint(100, (ROWS, 10)), export.AdamW(lr=1e-3), folder)


ARTIFACTS: Final[Mapping[str, Callable[[Path], None]]] = {
    "MLP, dropout, Adam": perceptron,
    "CNN, batch norm, SGD with momentum": convolutions,
    "GRU, SGD with momentum": recurrent,
    "transformer layer, LoRA, AdamW": adapters,
}


@dataclass(frozen=True)
class Work:
    """An artifact's folder, and rows for it as a JSON file."""

    folder: Path
    rows: Path


def make(name: str, folder: Path) -> Work:
    """Export one, and make its rows up."""
    torch.manual_seed(0)
    work = Work(folder / "artifact", folder / "rows.json")
    ARTIFACTS[name](work.folder)
    rng, count = np.random.default_rng(0), ROWS * BATCHES
    entries: dict[str, Any] = {}
    for port in device_sdk.Trainer(work.folder, providers="cpu").artifact.graphs["train"].inputs:
        if port.role == "batch":
            shape = (count, *resolve(port.shape[1:], {}))
            whole = port.dtype == "int64"
            drawn = rng.integers(4, size=shape) if whole else rng.standard_normal(shape, np.float32)
            entries[port.of] = drawn.tolist()
    work.rows.write_text(json.dumps(entries), encoding="utf-8")
    return work


# -- the three that train --------------------------------------------------------------------------


def in_python(work: Work, steps: int = STEPS) -> bytes:
    """The checkpoint after the steps."""
    trainer = device_sdk.Trainer(work.folder, providers="cpu", threads=1, seed=SEED)
    ports = trainer.artifact.graphs["train"].select("batch")
    given = json.loads(work.rows.read_text(encoding="utf-8"))
    rows = {port.of: np.array(given[port.of], port.dtype) for port in ports}
    for step in range(steps):
        chosen = np.arange(step * ROWS, (step + 1) * ROWS) % (ROWS * BATCHES)
        trainer.step({name: array[chosen] for name, array in rows.items()})
    file = work.folder.with_name("python.state")
    trainer.save(file)
    return file.read_bytes()


def in_node(work: Work, steps: int = STEPS) -> bytes:
    """The same by node.js."""
    file = work.folder.with_name("node.state")
    options = [f"--steps={steps}", f"--batch={ROWS}", f"--seed={SEED}", f"--state={file}"]
    run("node", "node.js", str(work.folder), str(work.rows), *options)
    return file.read_bytes()


def in_chromium(page: Page, work: Work, steps: int = STEPS) -> bytes:
    """The same by the page, in a browser that is running."""
    with served(work) as url:
        page.open(url)
        text = page.evaluate(
            "import('/page.js').then(async (page) => {"
            "  if (!page.trainer) throw new Error(document.body.innerText);"
            f"  page.trainer.seed = {SEED}n;"
            f"  await page.train({steps}, {ROWS});"
            "  const bytes = Array.from(await page.trainer.state());"
            "  return btoa(bytes.map((byte) => String.fromCharCode(byte)).join(''))})"
        )
    return base64.b64decode(text)


def run(*command: str) -> str:
    """What a command prints; it and its children end in time.

    Raises CalledProcessError, with what it says of an error, and TimeoutExpired.
    """
    with _running(*command) as process:
        printed, problem = process.communicate(timeout=SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, printed, problem)
    return printed


@contextlib.contextmanager
def served(work: Work) -> Iterator[str]:
    """The page's address while serve.js serves it."""
    with _running("node", "browser/serve.js", str(work.folder), str(work.rows), "0") as process:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], SECONDS)[0]:
            raise subprocess.TimeoutExpired(process.args, SECONDS)
        yield process.stdout.readline().strip()


@contextlib.contextmanager
def _running(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        cwd=HERE,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# -- the comparison --------------------------------------------------------------------------------


def difference(one: bytes, other: bytes) -> float:
    """The largest of any element of two states, as safetensors files."""
    ours, theirs = (safetensors.decode(each).tensors for each in (one, other))
    assert {n: a.shape for n, a in ours.items()} == {n: a.shape for n, a in theirs.items()}
    return max(
        float(np.max(np.abs(ours[name].astype(float) - theirs[name].astype(float)), initial=0.0))
        for name in ours
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="examples.javascript.compare", description=__doc__)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="its program")
    options = parser.parse_args(arguments)
    where = ["Node"] + (["Chromium"] if options.chromium else [])
    print(f"| after {STEPS} steps | numbers in the state | {' | '.join(where)} |")
    print("|---" * (2 + len(where)) + "|")
    with contextlib.ExitStack() as stack:
        page = stack.enter_context(Page(options.chromium)) if options.chromium else None
        for name in ARTIFACTS:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            work = make(name, folder)
            ours = in_python(work)
            theirs = [in_node(work)] + ([in_chromium(page, work)] if page else [])
            apart = " | ".join(f"{difference(ours, each):.2g}" for each in theirs)
            count = sum(each.size for each in safetensors.decode(ours).tensors.values())
            print(f"| {name} | {count:,} | {apart} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
