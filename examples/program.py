"""What examples over a fleet are as programs: their options, their bar of rounds, how they end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from aggregator.demo.child import FleetError
from benchmarks.harness import default_data_folder
from device_sdk.errors import DeviceError
from device_sdk.system.command_line import positive_int, print_any_text
from export import ExportError


def option_parser(
    name: str, description: str | None, *, rounds: int, holds: str
) -> argparse.ArgumentParser:
    """The command line of ``examples/<name>.py``: ``--rounds``, ``--data`` and ``--out``.

    Args:
        name: the module's.
        description: its docstring.
        rounds: unless told otherwise.
        holds: what the data folder holds.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m examples.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=positive_int, default=rounds, help=f"default: {rounds}")
    parser.add_argument(
        "--data",
        type=Path,
        default=default_data_folder(),
        help=f"folder that holds {holds} (default: TESSERA_DATA)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out") / name,
        help=f"for artifacts, homes, logs and the picture (default: out/{name})",
    )
    return parser


def carried_out(name: str, run: Callable[[Console], None]) -> int:
    """Run it; the exit status, 1 where a part failed, which is said, or somebody stopped it."""
    print_any_text()
    console = Console()
    try:
        run(console)
    except (DeviceError, ExportError, FleetError, OSError, ValueError) as error:
        said = f"{name.replace('_', ' ')}: {error}"
        Console(stderr=True).print(said, style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 1
    return 0


def how_often(points: float) -> str:
    """A difference of percentages in words: "1.4 points less often"."""
    return f"{abs(points):.1f} points {'less' if points < 0 else 'more'} often"
