"""A first run of an artifact in a process of its own, which can be ended whatever it does.

Nothing else ends a node that does not come back, and nothing else outlives one that crashes or
takes all of the machine's memory. An artifact that comes through this once may run in an app.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.publish.report import Reason

if TYPE_CHECKING:
    from device_sdk.artifact.manifest import Manifest

_POLL_SECONDS: Final = 0.02
_START_SECONDS: Final = 60.0
"""Python and onnxruntime are loaded within this, on the slowest device."""
_MEMORY, _REFUSED, _MISSING = 3, 4, 5
"""Exit statuses of the process: it could not have the memory; the artifact cannot be used; there is
no onnxruntime."""
_ENDED: Final = "ended with "
"""The last word of a process that ends by itself. Who has an app that waits for all its children,
or for none, does not learn of a status."""
# What onnxruntime calls a failed allocation.
_ALLOCATIONS: Final = ("bad_alloc", "bad allocation", "allocate memory", "out of memory")


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What each of the things that are tried may take.

    Attributes:
        seconds: the opening of one graph, or one run of it; the process' start goes by itself.
        memory_bytes: all of it together, beside what the process has without; None: what this
            machine has at that moment, as far as it tells.
    """

    seconds: float
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds is {self.seconds}; expected above 0")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; expected 1 or more, or None")


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How it went. ``reason``: None where the artifact may run; ``detail`` says why not."""

    reason: Reason | None = None
    detail: str = ""


PASSED: Final = TrialResult()


def can_try() -> bool:
    """Whether a process of its own can be had: not where Python is part of an app's own program."""
    is_python = Path(sys.executable or "").name.lower().startswith(("python", "pypy"))
    apart = sys.platform in ("android", "ios", "emscripten", "wasi")
    return is_python and not apart and not getattr(sys, "frozen", False)


def try_artifact(
    folder: Path, limits: TrialLimits, stopped: Callable[[], bool] = lambda: False
) -> TrialResult | None:
    """Open each graph of an artifact, and run it on a batch of its example's sizes.

    ``stopped`` is asked meanwhile; then, and where there is no process or no onnxruntime to be had,
    the result is None. A graph that raises passes: that is no danger, and who trains is told.
    """
    if not can_try():
        return None
    if limits.memory_bytes is None:
        from device_sdk.capability.machine import describe_machine  # seldom, and it loads much

        here = describe_machine(threads=1, provider="").memory_available_bytes
        limits = replace(limits, memory_bytes=here or None)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "device_sdk.trial", *_arguments(folder, limits)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError:
        return None
    with process:
        try:
            return _watched(process, limits, stopped)
        finally:
            process.kill()


def _watched(
    process: subprocess.Popen[bytes], limits: TrialLimits, stopped: Callable[[], bool]
) -> TrialResult | None:
    said: list[str] = []
    reader = threading.Thread(target=_listen, args=(process, said), daemon=True)
    reader.start()
    heard, since = 0, time.monotonic()
    while process.poll() is None:
        if stopped():
            return None
        if len(said) != heard:
            heard, since = len(said), time.monotonic()
        if time.monotonic() - since > (limits.seconds if said else _START_SECONDS):
            return TrialResult(
                Reason.STEP_TOO_LONG, f"{_doing(said)} did not end within {limits.seconds:g} s"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
    reader.join()
    ended = said.pop() if said and said[-1].startswith(_ENDED) else None
    status = None if ended is None else int(ended.removeprefix(_ENDED))
    if status == _MISSING:
        return None
    return PASSED if status == 0 else _result(status or process.returncode, said, limits)


def _listen(process: subprocess.Popen[bytes], said: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line.decode(errors="replace").rstrip())


def _arguments(folder: Path, limits: TrialLimits) -> list[str]:
    return [str(folder), str(limits.seconds), str(limits.memory_bytes or 0)]


def _result(status: int, said: Sequence[str], limits: TrialLimits) -> TrialResult:
    doing = _doing(said)
    most = "" if limits.memory_bytes is None else f" ({limits.memory_bytes / 2**20:,.0f} MiB)"
    # Nobody but the kernel kills it so, which chooses it before the app.
    if status in (_MEMORY, -getattr(signal, "SIGKILL", 9)):
        return TrialResult(
            Reason.OUT_OF_MEMORY, f"{doing} takes more memory than there is here{most}"
        )
    if status == _REFUSED:
        return TrialResult(Reason.DOES_NOT_FIT, doing)
    how = ""
    if status:
        how = f" by {signal.Signals(-status).name}" if status < 0 else f" with status {status}"
    return TrialResult(Reason.CRASHED, f"{doing} ended the process{how}")


def _doing(said: Sequence[str]) -> str:
    return said[-1] if said else "its start"


# Inside of the process.


def main() -> None:
    """Try the artifact of a folder; see :func:`try_artifact`."""
    folder, seconds, memory_bytes = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    from device_sdk.artifact.errors import ArtifactError

    try:
        from device_sdk.trainer import Trainer
    except ImportError:
        _end(_MISSING)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if memory_bytes:
        _bound(memory_bytes)
    try:
        _say("opening its train graph", seconds)
        trainer = Trainer(folder, providers="cpu")
    except ArtifactError as error:
        if _is_memory(error):
            _end(_MEMORY)
        _say(" ".join(str(error).split()), seconds)
        _end(_REFUSED)
    except Exception as error:
        _end(_MEMORY if _is_memory(error) else 0)
    runs: dict[str, Callable[[Mapping[str, NDArray[Any]]], object]]
    runs = {"train": trainer.step, "infer": trainer.predict, "evaluate": trainer.evaluate}
    for name in trainer.artifact.graphs:
        _say("a step" if name == "train" else f"opening or running its {name} graph", seconds)
        try:
            runs[name](example_batch(trainer.artifact, name))
        except Exception as error:
            if _is_memory(error):
                _end(_MEMORY)
    _end(0)  # what ends when the interpreter does was not tried


def _is_memory(error: Exception) -> bool:
    told = str(error).lower()
    return isinstance(error, MemoryError) or any(each in told for each in _ALLOCATIONS)


def example_batch(manifest: Manifest, graph: str) -> Mapping[str, NDArray[Any]]:
    """Zeros where integers are asked for, ones elsewhere, of the sizes of its export."""
    from device_sdk.artifact.shapes import DTYPES, resolve

    return {
        port.of: np.full(
            resolve(port.shape, manifest.example_sizes),
            int(np.issubdtype(DTYPES[port.dtype], np.floating)),
            DTYPES[port.dtype],
        )
        for port in manifest.graphs[graph].select("batch")
    }


def _say(what: str, seconds: float) -> None:
    """What begins now. Where nobody is there any more to end it, the kernel does."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()
    if hasattr(signal, "alarm"):
        signal.alarm(math.ceil(seconds) + math.ceil(_START_SECONDS))


def _end(status: int) -> NoReturn:
    sys.stdout.write(f"{_ENDED}{status}\n")
    sys.stdout.flush()
    os._exit(status)


def _bound(memory_bytes: int) -> None:
    """What this process has now may grow by so much, where the operating system can say so."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
