"""`tessera-export`: artifacts from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from device_sdk.artifact import ArtifactError
from device_sdk.system.printable import printable_lines
from export.cli import build, click, image, inspect, mf, operators
from export.errors import ExportError

_DESCRIPTION = """\
Turn a torch model, its loss and an optimizer into an artifact: a folder with one plain ONNX graph
for a whole training step, which stock onnxruntime runs on a device without torch."""

_EXAMPLES = """\
examples:
  tessera-export mf -o artifacts/mf              the factorisation model that ships with the SDK
  tessera-export image resnet -o artifacts/resnet --mutual
                                                 a small image network that learns from others
  tessera-export click cnn -o artifacts/cnn --attention
                                                 a click model with the distillation loss
  tessera-export build mymodels:lenet -o artifacts/lenet
                                                 your own: mymodels.py defines lenet()
  tessera-export inspect artifacts/lenet         what an artifact takes, holds and gives
  tessera-export operators                       the torch operators that can be exported
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main_parser = argparse.ArgumentParser(
        prog="tessera-export",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (mf, image, click, build, inspect, operators):
        module.add_to(commands)
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 where it failed, 2 for a wrong command line."""
    arguments = parser().parse_args(argv)
    try:
        run = arguments.run
        return int(run(arguments))
    except (ExportError, ArtifactError) as error:
        print(f"tessera-export: {printable_lines(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tessera-export: interrupted; nothing was written", file=sys.stderr)
        return 130
