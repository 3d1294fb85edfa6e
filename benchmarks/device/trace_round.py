"""`make trace-round`: what one warm round of scatter runs through on a device.

A device, `tessera-aggregator serve` and Mosquitto on this machine. The third round is traced, by
`sys.setprofile` in the device's own thread: from the manifest's message, taken from the link, to
the return of the publication that carries the update. Receipt and link's own thread are left out.

files: product files (`device_sdk/*.py`) of which any function was entered. functions: distinct
functions among them, by file and line; comprehensions and generator expressions belong to the
function in which they stand, and what dataclasses generate has no file. deep: the most frames of
product functions on the stack at once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import device_sdk
from benchmarks.aggregator.broker import running_mosquitto
from device_sdk.device import Device
from device_sdk.link.events import Event, Message
from device_sdk.link.link import Link

PRODUCT = Path(device_sdk.__file__).parent
TARGET = "at most 40 files, 170 functions, 11 deep"
ROUNDS = 3
_ITEMS = 200
_PATIENCE_SECONDS = 60.0
_TASK = """
[task]
catalogue = "items.tsv"
[broker]
url = "{url}"
[round]
most_rounds = {rounds}
pause_seconds = 1.0
[scatter]
columns = 16
"""


@dataclass
class Trace:
    """What was entered since :meth:`start`; functions by (file, line), with the depth of each."""

    functions: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)

    def start(self) -> None:
        """Forget what was, and watch this thread."""
        self.functions.clear()
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not _is_function(frame.f_code):
            return
        depth = 0
        above: FrameType | None = frame
        while above is not None:
            depth += _is_function(above.f_code)
            above = above.f_back
        code = frame.f_code
        place = (str(Path(code.co_filename).relative_to(PRODUCT.parent)), code.co_firstlineno)
        _, most = self.functions.get(place, ("", 0))
        self.functions[place] = (code.co_qualname, max(depth, most))

    @property
    def files(self) -> set[str]:
        """Distinct files."""
        return {file for file, _ in self.functions}

    @property
    def deep(self) -> int:
        """Most product frames at once."""
        return max((depth for _, depth in self.functions.values()), default=0)


def _is_function(code: CodeType) -> bool:
    made_of_code = code.co_name.startswith("<") and code.co_name != "<lambda>"
    return not made_of_code and code.co_filename.startswith(f"{PRODUCT}{os.sep}")


def trace_round(folder: Path) -> Trace:
    """Trace the last of ``ROUNDS`` rounds. Raises RuntimeError where Mosquitto is missing, or the
    rounds do not come to their end."""
    traces: list[Trace] = []
    _watch_link(traces)
    home = folder / "fleet"
    with running_mosquitto(folder) as broker:
        _command(home, "init")
        (home / "task.toml").write_text(_TASK.format(url=broker.url(), rounds=ROUNDS))
        (home / "items.tsv").write_text("".join(f"item-{row}\n" for row in range(_ITEMS)))
        code = _command(home, "invite").split()[0]
        serve = subprocess.Popen(
            [sys.executable, "-m", "aggregator.cli", "serve", "--home", str(home)],
            stdout=subprocess.DEVNULL,
        )
        try:
            with Device.enrol(broker.url(), code, folder / "device") as device:
                device.record_all([(f"item-{row}", "anna") for row in range(0, _ITEMS, 5)])
                device.start()
                until = time.monotonic() + _PATIENCE_SECONDS
                while device.status().receipted_round != ROUNDS:
                    if time.monotonic() > until:
                        raise RuntimeError(f"round {ROUNDS} did not end: {device.status()}")
                    time.sleep(0.05)
        finally:
            serve.terminate()
            serve.wait(20)
    return traces[-1]


def _watch_link(traces: list[Trace]) -> None:
    """A trace for each manifest that a device's link gives, until its update is published."""
    events, publish = Link.events, Link.publish

    def watched(link: Link, *values: Any, **named: Any) -> Iterator[Event]:
        for event in events(link, *values, **named):
            if isinstance(event, Message) and "/manifest/" in event.topic:
                traces.append(Trace())
                traces[-1].start()
            yield event

    def published(link: Link, topic: str, *values: Any, **named: Any) -> None:
        publish(link, topic, *values, **named)
        if traces and "/up/" in topic:
            sys.setprofile(None)

    Link.events, Link.publish = watched, published  # type: ignore[method-assign,assignment]


def _command(home: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "aggregator.cli", arguments[0], "--home", str(home)]
    done = subprocess.run([*command, *arguments[1:]], capture_output=True, text=True, check=True)
    return done.stdout


def main() -> int:
    """Print the three numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.trace_round")
    parser.add_argument("--list", action="store_true", help="every file with its functions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        trace = trace_round(Path(temporary))
    if arguments.list:
        for file in sorted(trace.files):
            named = [(n, d) for (f, _), (n, d) in sorted(trace.functions.items()) if f == file]
            print(f"{file} ({len(named)})")
            for name, depth in named:
                print(f"    {depth:2} {name}")
    print(
        f"a warm round of scatter on a device: {len(trace.files)} files, "
        f"{len(trace.functions)} functions, {trace.deep} deep (target: {TARGET})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
