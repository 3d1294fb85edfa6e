"""A first run of an artifact in a process of its own, which can be ended whatever it does.

Nothing else ends a node that does not come back, and nothing else outlives one that crashes or
takes all of the machine's memory. An artifact that comes through this once may run in an app.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from device_sdk.fields import Declared, Within
from device_sdk.system.lock import OwnedHandle
from device_sdk.wire.publish.report import Reason

if TYPE_CHECKING:
    from device_sdk.artifact.manifest import Manifest

_LOG = logging.getLogger("device_sdk")
_POLL_SECONDS: Final = 0.02
_LIVED_SECONDS: Final = 1.0
"""Of the time between two looks as much counts: beyond that this process was not run either."""
_START_SECONDS: Final = 60.0
"""Python and onnxruntime are loaded within this, on the slowest device."""
_TURN_SECONDS: Final = 30.0
_MOST_STEPS: Final = 1000
_MEMORY, _REFUSED, _MISSING = 3, 4, 5
"""Exit statuses of the process: it could not have the memory; the artifact cannot be used; there is
no onnxruntime."""
_SAYS: Final = "trial: "
"""Begins the lines that the process says of itself; others are of libraries, or of its crash."""
_ENDED: Final = "ended with "
"""The last word of a process that ends by itself. Who has an app that waits for all its children,
or for none, does not learn of a status."""
_MOST_CHATTER: Final = 20
# What onnxruntime calls a failed allocation.
_ALLOCATIONS: Final = (
    "bad_alloc",
    "bad allocation",
    "allocate memory",
    "out of memory",
    "memoryerror",
)
_PYTHON: Final = re.compile(r"(python|pypy)[\d._dtw]*(-intel64|-64|-32)?(\.exe)?", re.IGNORECASE)
# By these a process ends for what it did itself; others come from outside.
_FAULTS: Final = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")
# So Python's fault handler begins, which tells of most of them where no status is to be had.
_FATAL: Final = ("Fatal Python error", "Windows fatal exception")


@dataclass(frozen=True, slots=True)
class TrialLimits(Declared):
    """What each of the things that are tried may take.

    Attributes:
        seconds: the opening of one graph, or one run of it; the process' start goes by itself.
        memory_bytes: all of it together, beside what the process has without; None: what this
            machine has at that moment, as far as it tells.
        more_seconds: for so long further steps are taken, 1,000 at most; 0: one alone.
    """

    seconds: Annotated[float, Within(0, above=True)]
    memory_bytes: Annotated[int, Within(1)] | None = None
    more_seconds: Annotated[float, Within(0)] = 0.0


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How it went. ``reason``: None where the artifact may run; ``detail`` says why not.

    ``certain``: whether it is the artifact's own doing, and not perhaps another's on this machine.
    """

    reason: Reason | None = None
    detail: str = ""
    certain: bool = True


PASSED: Final = TrialResult()


def can_try() -> bool:
    """Whether a process of its own can be had: not where Python is part of an app's own program."""
    is_python = _PYTHON.fullmatch(Path(sys.executable or "").name) is not None
    apart = sys.platform in ("android", "ios", "emscripten", "wasi")
    return is_python and not apart and not getattr(sys, "frozen", False)


def try_artifact(
    folder: Path, limits: TrialLimits, stopped: Callable[[], bool] = lambda: False
) -> TrialResult | None:
    """Open each graph of an artifact, and run it on a batch of its example's sizes.

    ``stopped`` is asked meanwhile; then, and where there is no process or no onnxruntime to be had,
    the result is None. A graph that raises passes: that is no danger, and who trains is told.
    """
    try:
        return supervised("device_sdk.trial", [os.path.abspath(folder)], limits, stopped)
    except Untried as why:
        _LOG.warning(
            "the artifact in %s had no first run in a process of its own: %s. It runs in this one, "
            "where a crash of it takes the app with it",
            folder,
            why,
        )
        return None


class Untried(Exception):
    """This machine's environment let no trial be had; it says why."""


def supervised(
    module: str,
    arguments: Sequence[str],
    limits: TrialLimits,
    stopped: Callable[[], bool] = lambda: False,
) -> TrialResult | None:
    """Run a module in a process of its own, which begins with :func:`begin`, :func:`say`s what it
    does and comes to its :func:`end`.

    None where no process is to be had, where ``stopped`` is true meanwhile, and without
    onnxruntime. Raises :class:`Untried`.
    """
    if not can_try():
        return None
    with _turn(stopped):
        return None if stopped() else _tried(module, arguments, limits, stopped)


@contextlib.contextmanager
def _turn(stopped: Callable[[], bool]) -> Iterator[None]:
    """One trial at a time of those that know of each other: each may take what memory there is.

    Who waits for half a minute goes on: whoever has the turn may be stopped for good.
    """
    try:
        handle = OwnedHandle(Path(__file__), os.open(__file__, os.O_RDONLY))
    except OSError:  # in an archive, say
        yield
        return
    try:
        for _ in range(round(_TURN_SECONDS / _POLL_SECONDS)):
            if stopped() or _take(handle.number):
                break
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        handle.close()


def _take(number: int) -> bool:
    """Whether the turn was free, or cannot be had here at all."""
    try:
        import fcntl

        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def _tried(
    module: str, arguments: Sequence[str], limits: TrialLimits, stopped: Callable[[], bool]
) -> TrialResult | None:
    if limits.memory_bytes is None:
        from device_sdk.capability.machine import describe_machine  # seldom, and it loads much

        here = describe_machine(threads=1, provider="").memory_available_bytes
        limits = replace(limits, memory_bytes=here or None)
    killed_before = _killed_for_memory()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *_numbers(limits), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(where_modules_are())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError as error:
        raise Untried(f"no process could be started ({error})") from error
    said = _Said()
    with process:
        try:
            return _watched(process, limits, said, stopped, killed_before)
        except RuntimeError as error:  # no thread is to be had
            raise Untried(str(error)) from error
        finally:
            process.kill()


def where_modules_are() -> list[str]:
    """As this process finds them, but for its working directory's: this package alone is found
    there too."""
    return [*filter(None, sys.path), str(Path(__file__).resolve().parents[1])]


class _Said:
    """What was heard of the process: its own words, and the last lines of anything else."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.chatter: deque[str] = deque(maxlen=_MOST_CHATTER)
        self.ended: int | None = None

    def listen(self, process: subprocess.Popen[bytes]) -> None:
        """Until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            if not text.startswith(_SAYS):
                self.chatter.append(text)
            elif text.startswith(_SAYS + _ENDED):
                self.ended = int(text.removeprefix(_SAYS + _ENDED))
            else:
                self.words.append(text.removeprefix(_SAYS))

    @property
    def doing(self) -> str:
        return self.words[-1] if self.words else "its start"


def _watched(
    process: subprocess.Popen[bytes],
    limits: TrialLimits,
    said: _Said,
    stopped: Callable[[], bool],
    killed_before: int,
) -> TrialResult | None:
    reader = threading.Thread(target=said.listen, args=(process,), daemon=True)
    reader.start()
    heard, spent, looked = 0, 0.0, time.monotonic()
    while process.poll() is None:
        if stopped():
            return None
        now = time.monotonic()
        spent, looked = spent + min(now - looked, _LIVED_SECONDS), now
        if len(said.words) != heard:
            heard, spent = len(said.words), 0.0
        if not heard and spent > _START_SECONDS:
            raise Untried(f"it did not start within {_START_SECONDS:g} s")
        if heard and spent > limits.seconds:
            detail = f"{said.doing} did not end within {limits.seconds:g} s"
            return TrialResult(Reason.STEP_TOO_LONG, detail)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
    reader.join()
    if stopped():
        return None
    if said.ended == _MISSING:
        return None
    # Before its first word nothing of the artifact was read.
    if not said.words:
        raise Untried(said.chatter[-1] if said.chatter else "it ended at its start")
    return _result(process.returncode, said, limits, _killed_for_memory() > killed_before)


def _numbers(limits: TrialLimits) -> list[str]:
    return [*map(str, (limits.seconds, limits.memory_bytes or 0, limits.more_seconds))]


def _killed_for_memory() -> int:
    """How many processes of this machine the kernel has killed for want of memory; 0 where it does
    not say. What somebody else's signal ends does not count."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def _result(returncode: int, said: _Said, limits: TrialLimits, kernel_killed: bool) -> TrialResult:
    doing, ended = said.doing, said.ended
    if ended == 0:
        return PASSED
    if ended == _REFUSED:
        return TrialResult(Reason.DOES_NOT_FIT, doing)
    if ended == _MEMORY or any(map(_tells_of_memory, said.chatter)):
        most = "" if limits.memory_bytes is None else f" ({limits.memory_bytes / 2**20:,.0f} MiB)"
        detail = f"{doing} takes more memory than there is here{most}"
        return TrialResult(Reason.OUT_OF_MEMORY, detail)
    how = ""
    if returncode < 0:
        how = f" by {_signal_name(-returncode)}"
    elif returncode:
        how = f" with status {returncode:#x}"
    if _is_fault(returncode) or any(each.startswith(_FATAL) for each in said.chatter):
        return TrialResult(Reason.CRASHED, f"{doing} ended the process{how}")
    # 0 without a last word: how it ended is known to nobody.
    if kernel_killed and returncode in (0, -getattr(signal, "SIGKILL", 9)):
        # Whoever took the memory, this process is the first to go: it said so itself.
        detail = f"its first run was ended for want of memory on this machine, in {doing}"
        return TrialResult(Reason.OUT_OF_MEMORY, detail, certain=False)
    detail = f"its first run was ended from outside{how}, in {doing}"
    return TrialResult(Reason.KILLED, detail, certain=False)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


def _is_fault(returncode: int) -> bool:
    if returncode < 0:
        return _signal_name(-returncode) in _FAULTS
    # Windows' are errors of NTSTATUS, of which one is a Ctrl-C.
    return returncode >= 0xC0000000 and returncode != 0xC000013A


# Inside of the process.


def begin() -> tuple[TrialLimits, list[str]]:
    """What this process may take, which it is bound to from here on, and its arguments."""
    seconds, memory, more = (float(each) for each in sys.argv[1:4])
    # A terminal's Ctrl-C goes to the app, which ends this process as it sees fit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(sys.stdout, all_threads=False)
    try:
        import device_sdk.trainer  # noqa: F401
    except ImportError:
        end(_MISSING)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    limits = TrialLimits(seconds, int(memory) or None, more)
    if limits.memory_bytes:
        _bound(limits.memory_bytes)
    return limits, sys.argv[4:]


def main() -> None:
    """Try the artifact of a folder; see :func:`try_artifact`."""
    limits, (folder,) = begin()
    from device_sdk.artifact.errors import ArtifactError
    from device_sdk.trainer import Trainer

    seconds = limits.seconds
    try:
        say("opening its train graph", seconds)
        trainer = Trainer(folder, providers="cpu")
    except ArtifactError as error:
        if is_memory(error):
            end(_MEMORY)
        say(" ".join(str(error).split()), seconds)
        end(_REFUSED)
    except Exception as error:
        end(_MEMORY if is_memory(error) else 0)
    runs: dict[str, Callable[[Mapping[str, NDArray[Any]]], object]]
    runs = {"train": trainer.step, "infer": trainer.predict, "evaluate": trainer.evaluate}
    for name in trainer.artifact.graphs:
        say("a step" if name == "train" else f"opening or running its {name} graph", seconds)
        _run(runs[name], example_batch(trainer.artifact, name))
    batch, until = example_batch(trainer.artifact, "train"), time.monotonic() + limits.more_seconds
    while trainer.step_count < _MOST_STEPS and time.monotonic() < until:
        say(f"step {trainer.step_count + 1}", seconds)
        if not _run(trainer.step, batch):
            break
    end(0)  # what ends when the interpreter does was not tried


def _run(call: Callable[[Mapping[str, NDArray[Any]]], object], batch: Mapping[str, Any]) -> bool:
    """Whether it came to its end without an error."""
    try:
        call(batch)
    except Exception as error:
        if is_memory(error):
            end(_MEMORY)
        return False
    return True


def is_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or _tells_of_memory(str(error))


def _tells_of_memory(text: str) -> bool:
    return any(each in text.lower() for each in _ALLOCATIONS)


def example_batch(manifest: Manifest, graph: str) -> Mapping[str, NDArray[Any]]:
    """Zeros where integers are asked for, ones elsewhere, of the sizes of its export."""
    from device_sdk.artifact.parts import DTYPES, resolve

    return {
        port.of: np.full(
            resolve(port.shape, manifest.example_sizes),
            int(np.issubdtype(DTYPES[port.dtype], np.floating)),
            DTYPES[port.dtype],
        )
        for port in manifest.graphs[graph].select("batch")
    }


def say(what: str, seconds: float) -> None:
    """What begins now. Where nobody is there any more to end it, the kernel does."""
    sys.stdout.write(f"{_SAYS}{what}\n")
    sys.stdout.flush()
    if hasattr(signal, "alarm"):
        signal.alarm(math.ceil(seconds) + math.ceil(_START_SECONDS))


def end(status: int) -> NoReturn:
    sys.stdout.write(f"{_SAYS}{_ENDED}{status}\n")
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
