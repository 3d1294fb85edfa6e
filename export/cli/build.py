"""`tessera-export build package.module:function`: a user's own model."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from device_sdk.rehearsal import supervise
from device_sdk.system.printable import printable
from device_sdk.trial import TrialLimits
from export.build import export_train_step
from export.cli.options import add_output, print_written
from export.errors import ExportError

_CASE_SECONDS = 30.0
DESCRIPTION = """\
Export a model of your own. FUNCTION takes no arguments and returns a dict with the arguments of
export.train_step (all but the directory):

  # mymodels.py
  import torch, export

  def classifier():
      model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))

      def loss(model, batch):
          logits = model(batch["features"])
          return export.losses.cross_entropy(logits, batch["label"]), {"logits": logits}

      return dict(
          model=model,
          loss=loss,
          example_batch={"features": torch.randn(16, 8), "label": torch.randint(3, (16,))},
          optimizer=export.AdamW(lr=1e-3),  # or torch.optim.AdamW(model.parameters(), ...)
          dynamic={"features": {0: "batch"}, "label": {0: "batch"}},
      )

  $ tessera-export build mymodels:classifier -o artifacts/classifier

Optimizers: export.Sgd, SgdW, Adam, AdamW, RMSprop, Adagrad, Adadelta, Lion, Lamb, Muon, Segmented,
of parameter groups by export.Groups; around one of them export.Clipped (gradients), Accumulated
(steps), Averaged (parameters) and Scheduled (rates, export.schedules): see
docs/export/optimizers.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("function", metavar="PACKAGE.MODULE:FUNCTION")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    given = _arguments_of(arguments.function)
    start = time.perf_counter()
    exported = export_train_step(
        **given,
        directory=arguments.out,
        verify=not arguments.no_verify,
        progress=(lambda text: None) if arguments.quiet else None,
    )
    seconds = time.perf_counter() - start
    print_written(exported, f" in {seconds:.1f} s")
    _rehearse(exported.directory)
    return 0


_OWN = ("aggregator", "device_sdk", "export", "onnx", "torch")


def _rehearse(artifact: Path) -> None:
    """Say what devices may bring that this artifact does not train on."""
    with tempfile.TemporaryDirectory() as folder:
        arguments, limits = [str(artifact.resolve())], TrialLimits(_CASE_SECONDS)
        found = supervise("device_sdk.rehearsal", arguments, limits, Path(folder))
    if found is not None:
        for line in (*found.lines, *([found.problem] if found.problem else [])):
            print(printable(line))


def _arguments_of(reference: str) -> dict[str, Any]:
    module_name, separator, function_name = reference.partition(":")
    if not separator or not module_name or not function_name:
        raise ExportError(f"{reference!r} is not PACKAGE.MODULE:FUNCTION")
    if module_name.partition(".")[0] in _OWN:
        raise ExportError(
            f"{module_name!r} is the name of a package that comes with this command, which Python "
            "would import in place of a file of yours",
            instead=f"another name: my_{module_name}.py, and my_{reference}",
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise ExportError(
                f"{module_name} needs {error.name}, which is not installed"
            ) from error
        raise ExportError(
            f"there is no module {module_name!r} here or in the Python path",
            instead="run from the folder that holds it, or set PYTHONPATH",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        defined = sorted(n for n, v in vars(module).items() if inspect.isfunction(v))
        raise ExportError(
            f"{module_name} has no function {function_name!r}",
            instead=f"one of: {', '.join(defined) or 'none is defined'}",
        )
    given = function()
    if not isinstance(given, Mapping):
        raise ExportError(
            f"{reference} returned something of type {type(given).__name__}",
            instead="a dict with model, loss, example_batch, optimizer and dynamic",
        )
    known = set(inspect.signature(export_train_step).parameters) - {
        "directory",
        "verify",
        "progress",
    }
    needed = {"model", "loss", "example_batch", "optimizer", "dynamic"}
    wrong = sorted(set(given) - known)
    missing = sorted(needed - set(given))
    if wrong or missing:
        raise ExportError(
            f"{reference} returned unknown keys {wrong} and lacks {missing}",
            instead=f"the keys {', '.join(sorted(needed))} and optionally predict, gradient, "
            "metrics, name",
        )
    return dict(given)
