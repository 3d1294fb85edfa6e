"""``python -m benchmarks.peers``: one round of a fleet here and in Flower's simulator."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from tabulate import tabulate

_FLOWER = "flwr[simulation]>=1.29,<1.30"
_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("flower_round.py")

_DESCRIPTION = """\
Measures one round in which every device takes part: ours with real training on ML-1M (6,040
devices, K = 32), Flower's simulation engine with clients that only return a 3,706 x 32 model.
Flower is installed into an environment of its own (about 420 MB), which is kept for the next time.
"""


class _Found(TypedDict):
    clients: int
    round_seconds: list[float]
    peak_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, measure, print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        default=[100, 1000],
        help="fleet sizes for Flower (default: 100 1000; 6040 takes minutes and about 6 GB)",
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each size")
    parser.add_argument(
        "--environment",
        type=Path,
        default=_ROOT / ".venv-flower",
        help="where Flower is installed (default: .venv-flower)",
    )
    parser.add_argument("--skip-own", action="store_true", help="measure Flower alone")
    options = parser.parse_args(arguments)

    _install(options.environment)
    lines = []
    for clients in options.clients:
        found = _flower(options.environment, clients, options.rounds)
        seconds = ", ".join(f"{one:.1f}" for one in found["round_seconds"])
        memory = f"{found['peak_bytes'] / 1e6:,.0f} MB"
        lines.append(("Flower, near-empty clients", f"{clients:,}", seconds, memory))
    print(tabulate(lines, headers=("simulator", "devices", "seconds a round", "peak memory")))
    if not options.skip_own:
        # A process of its own, so that nothing that was loaded here counts.
        own = [sys.executable, "-m", "benchmarks.scatter.full_round"]
        print("Tessera, real training:", flush=True)
        subprocess.run(own, check=True, cwd=_ROOT)
    return 0


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _install(folder: Path) -> None:
    python = _python(folder)
    stamp = folder / ".installed"
    if not stamp.exists():
        print(f"installing {_FLOWER} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", _FLOWER, "psutil"]
        # The project's own version constraints are not Flower's.
        subprocess.run(install, check=True, env=_clean_environment(folder))
        stamp.write_text(_FLOWER, encoding="utf-8")


def _flower(folder: Path, clients: int, rounds: int) -> _Found:
    print(f"Flower with {clients} clients", file=sys.stderr, flush=True)
    command = [str(_python(folder)), str(_SCRIPT), str(clients), str(rounds)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=_clean_environment(folder)
    )
    if done.returncode:
        raise SystemExit(f"Flower failed with {clients} clients:\n{done.stderr[-2000:]}")
    found: _Found = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _clean_environment(folder: Path) -> dict[str, str]:
    dropped = ("PIP_CONSTRAINT", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    # Flower would otherwise keep its state in the user's home.
    return {**kept, **quiet, "FLWR_HOME": str((folder / "flower-home").resolve())}


if __name__ == "__main__":
    raise SystemExit(main())
