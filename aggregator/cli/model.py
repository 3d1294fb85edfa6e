"""``tessera-aggregator model``: a version's model as a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from aggregator.cli.arguments import add_home, add_task, opened
from aggregator.errors import AggregatorError
from aggregator.models import Format
from device_sdk.system.command_line import add_out
from device_sdk.system.files import write_atomically

DESCRIPTION = """\
Writes the model of a version as a file that needs nothing of Tessera. safetensors holds the arrays
under torch's names; of a scatter task the item vectors, with the items' ids as metadata. onnx is a
plain graph from inputs to outputs that onnxruntime runs as it is: it is run here before it is
written, beside what a device predicts. Of a scatter task onnx writes two: FILE scores all items for
a user's vector, and FILE with .fold-in finds the vector of somebody new from the items they like.
Works whether serve runs or not."""
EXAMPLES = """\
examples:
  tessera-aggregator model --home fleet --out model.safetensors
  tessera-aggregator model --home fleet --version best --out model.onnx
  tessera-aggregator model --home fleet --version 12 --format safetensors --out twelve"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    add_task(parser)
    parser.add_argument(
        "--version",
        default="latest",
        metavar="WHICH",
        help="best, latest or a number, as models lists them (default: latest)",
    )
    parser.add_argument(
        "--format", choices=get_args(Format), help="default: what FILE ends with, else safetensors"
    )
    add_out(parser, metavar="FILE", help="replaced where it exists", required=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    out: Path = arguments.out
    form: Format = arguments.format or ("onnx" if out.suffix == ".onnx" else "safetensors")
    with opened(arguments) as fleet:
        found = fleet.model(arguments.version, arguments.task, form)
    for part, data in found.files.items():
        path = out.with_name(f"{out.stem}{part}{out.suffix}") if part else out
        try:
            write_atomically(path, data)
        except OSError as error:
            raise AggregatorError(f"{path} cannot be written: {error.strerror}") from None
        print(f"{path}: version {found.version} of task {found.task}, {len(data):,} bytes")
    return 0
