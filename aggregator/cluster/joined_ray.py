"""This process in a Ray cluster, or in a Ray of its own on this machine."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from aggregator.errors import AggregatorError
from aggregator.events import LogEvent
from device_sdk.system.command_line import held_signals

_LOOK_SECONDS = 0.05


_TRY_SECONDS = 60.0
_TOKEN = (
    "give all of its machines, and this process, the same RAY_AUTH_MODE=token and RAY_AUTH_TOKEN "
    "(or RAY_AUTH_TOKEN_PATH), and restart Ray: see docs/cluster.md"
)
# Another process: Ray reads once in a process whether it shows a token.
_STRANGER = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", b"session", timeout=5)
except AuthenticationError:
    print("refused")
else:
    print("let in")
"""


# What keeps strangers out of a Ray cluster that we use: its token, and who reaches its folder.
#
# Whoever reaches one of Ray's ports with its token runs code as its user. Ray makes its folder on a
# machine open to all (0777, no sticky bit), wherever it lies: whoever reaches that can put a link
# in the place of a log, which Ray's processes then write through as their user, and another socket
# in the place of theirs. Only a folder above it can keep others out.


def require_strangers_refused(address: str, asked_to_end: Callable[[], bool]) -> bool:
    """Ask a Ray cluster's head for something without a token; False where we were asked to end
    meanwhile.

    Raises AggregatorError unless it refuses because there was none.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    }
    environment["RAY_AUTH_MODE"] = "disabled"
    until_seconds = time.monotonic() + _TRY_SECONDS
    with subprocess.Popen(
        [sys.executable, "-c", _STRANGER, address],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as stranger:
        try:
            while stranger.poll() is None and time.monotonic() < until_seconds:
                if asked_to_end():
                    return False
                time.sleep(_LOOK_SECONDS)
        finally:
            stranger.kill()
        said, errors = stranger.communicate()
    if said == "let in\n":
        raise AggregatorError(
            f"the Ray cluster at {address} needs no token: whoever reaches its ports can run code "
            f"there, and would read what this process sends it. To keep strangers out, {_TOKEN}"
        )
    if said != "refused\n":
        lines = errors.strip().splitlines() or ["no answer"]
        raise AggregatorError(
            f"the Ray cluster at {address} does not say whether it asks for a token "
            f"({lines[-1]}). Is it running, and of the same version?"
        )
    return True


def require_private_token(environment: Mapping[str, str], user_home: Path) -> None:
    """Raises AggregatorError where others can read the file that Ray takes its token from."""
    if environment.get("RAY_AUTH_TOKEN"):
        return
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else user_home / ".ray" / "auth_token"
    try:
        found = path.stat()
    except OSError:
        return  # there is none: Ray says so
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in _ours():
        raise AggregatorError(
            f"others can read Ray's token in {path}: chown it to this user and chmod 600 it, and "
            "draw a new token where somebody may have read it"
        )


def require_private_folder(folder: Path) -> None:
    """Raises AggregatorError where another user of this machine (but root) reaches a folder of
    Ray's, or can put another in its place."""
    if os.name != "posix" or is_private(folder):
        return
    raise AggregatorError(
        f"other users of this machine reach Ray's folder {folder}, and can have Ray write to any "
        "file of its user's through a link there: start Ray with --temp-dir below a folder of its "
        "user's own with mode 0700, such as ray start --temp-dir=$HOME/ray after chmod "
        "700 $HOME (see docs/cluster.md)"
    )


def is_private(folder: Path) -> bool:
    """Whether a folder above it, or itself, lets nobody in but its owner, who is this process's
    user or root, and nobody else can replace that one."""
    place = folder.resolve()
    for each in (*reversed(place.parents), place):
        found = each.lstat()
        if found.st_uid not in _ours() or not stat.S_ISDIR(found.st_mode):
            return False
        if not stat.S_IMODE(found.st_mode) & 0o077:
            return True
        if _is_replaceable_in(found.st_mode):
            return False
    return False


def is_lasting(folder: Path) -> bool:
    """Whether what this process makes in a folder stays there: nobody else can replace it."""
    place = folder.resolve()
    for each in (place, *place.parents):
        try:
            found = each.lstat()
        except OSError:
            return False
        if found.st_uid not in _ours() or _is_replaceable_in(found.st_mode):
            return False
    return True


def _is_replaceable_in(mode: int) -> bool:
    return bool(mode & 0o022) and not mode & stat.S_ISVTX


def _ours() -> tuple[int, int]:
    return (0, os.geteuid())


_REACH_SECONDS = 5.0
_JOIN_SECONDS = 60.0
_START_SECONDS = 300.0
_MOST_FOLDER_BYTES = 42
_BELOW = "r"


class JoinedRay:
    """``address``: ``HOST:PORT`` of a running cluster's head; None: a Ray of our own with ``cores``
    to give away, which ends with us and leaves nothing behind. ``log_to_driver``: whether what its
    actors log is shown here. One that does not keep strangers out is refused, whatever it is for:
    who gets in runs code as its user. One of our own listens on the loopback interface, asks for a
    token that is drawn anew, and lies in a folder that nobody else enters.

    Attributes:
        ray: the module, once :meth:`join` was called.
    """

    def __init__(self, address: str | None, cores: int, *, log_to_driver: bool) -> None:
        self.ray: Any = None
        self.own = address is None
        self._address, self._cores, self._log_to_driver = address, cores, log_to_driver
        self._folder: Path | None = None

    def join(self) -> bool:
        """Whether we have joined; else we were asked to end meanwhile. Takes a minute at most, and
        a few to start a Ray of our own on a machine that is busy.

        Raises AggregatorError where Ray is not installed, or the cluster cannot be joined.
        """
        if self._address is not None:
            _require_reachable(self._address)
        # Before Ray is imported: it reads them once.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # By default its processes give way (niceness 15) to whatever else the machine does.
        os.environ.setdefault("RAY_worker_niceness", "0")
        for name in ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_DEDUP_LOGS", "RAY_COLOR_PREFIX"):
            os.environ.setdefault(name, "0")
        if self.own:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            # As by default on macOS and Windows: this machine's address is 127.0.0.1, and all of
            # Ray's ports are there alone.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        elif "RAY_AUTH_TOKEN" in os.environ:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # else it is not shown to the head
        try:
            with held_signals():
                import ray
        except ImportError as error:
            raise AggregatorError(
                f"--cluster ray needs Ray ({error}): pip install 'tessera-edge[aggregator,cluster]'"
            ) from None
        self.ray = ray
        logging.getLogger("ray").setLevel(logging.ERROR)
        if self.own:
            self._folder = _own_folder()
        else:
            require_private_token(os.environ, Path.home())
        try:
            return self._begin()
        except BaseException:
            self._remove_folder()
            raise

    def leave(self) -> None:
        """End a Ray of our own; leave another one without a word to its actors."""
        if self.ray is not None and self.ray.is_initialized():
            with held_signals():  # it gives them back to nobody
                self.ray.shutdown()
        self._remove_folder()

    def _begin(self) -> bool:
        """On a thread: Ray waits for a head that does not answer as long as it likes, and ends the
        process that is asked to end meanwhile."""
        found: list[BaseException | None] = []

        def work() -> None:
            try:
                self._init()
            except BaseException as error:
                found.append(error)
            else:
                found.append(None)
                # A Ray of our own ends with the thread that began it.
                threading.Event().wait()

        seconds = _JOIN_SECONDS if self._address is not None else _START_SECONDS
        until_seconds = time.monotonic() + seconds
        asked = False
        _unblock_in_children()
        with held_signals() as asked_to_end:
            if self._address is not None and not require_strangers_refused(
                self._address, asked_to_end
            ):
                return False
            threading.Thread(target=work, name="tessera-ray", daemon=True).start()
            while not found and time.monotonic() < until_seconds:
                if asked_to_end() and not asked:
                    asked = True
                    if self._address is not None:
                        return False
                    LogEvent.END_AWAITED.log()
                time.sleep(_LOOK_SECONDS)
        error = found[0] if found else TimeoutError(f"it does not answer within {seconds:.0f} s")
        if error is None:
            require_private_folder(Path(self.ray.get_runtime_context().get_temp_dir()))
            return not asked
        said = first_line(error)
        raise AggregatorError(
            f"a Ray of its own cannot be started here: {said}. See docs/cluster.md"
            if self._address is None
            else f"the Ray cluster at {self._address} cannot be joined: {said}. Is it running, of "
            "the same version, with the same token, and does the address name its head?"
        ) from None

    def _init(self) -> None:
        """On the thread."""
        common: dict[str, Any] = {
            "log_to_driver": self._log_to_driver,
            "logging_level": logging.ERROR,
            "configure_logging": False,
        }
        if self._address is not None:
            self.ray.init(self._address, **common)
            return
        assert self._folder is not None
        self.ray.init(
            "local",
            include_dashboard=False,
            _temp_dir=str(self._folder / _BELOW),
            num_cpus=self._cores,
            object_store_memory=256 << 20,
            **common,
        )
        place = self.ray.util.get_node_ip_address()
        if not ip_address(place).is_loopback:
            raise AggregatorError(f"it listens at {place}, and not on the loopback interface alone")

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def first_line(error: BaseException) -> str:
    """Of what an error of Ray's says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _require_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise AggregatorError(f"{address} is no address of Ray's head such as 10.0.0.5:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except OSError as error:
        raise AggregatorError(
            f"the Ray cluster at {address} cannot be reached: {error.strerror or error}. Is its "
            "head running, and is this its address?"
        ) from None


def _unblock_in_children() -> None:
    """What Ray starts must not go on holding signals as we do."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_unblock)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


def _own_folder() -> Path:
    """A new one that nobody else enters; Ray makes its own below it. Ray's sockets lie some 60
    bytes below that, and a socket's path has 107 at most. What processes of ours left that were
    killed is removed.

    Raises AggregatorError where there is no place for one.
    """
    places = [Path(each) for each in dict.fromkeys((tempfile.gettempdir(), "/tmp"))]
    prefix = "tessera-ray-"
    for place in places:
        for each in place.glob(f"{prefix}*"):
            owner = each.name.removeprefix(prefix).partition("-")[0]
            if owner.isdecimal() and not _lives(int(owner)) and _is_ours(each):
                shutil.rmtree(each, ignore_errors=True)
    for place in places:
        if os.name == "posix" and not is_lasting(place):
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=place))
        if len(str(folder / _BELOW)) <= _MOST_FOLDER_BYTES:
            return folder
        folder.rmdir()
    raise AggregatorError(
        f"Ray needs a folder in {' or '.join(map(str, places))} that other users cannot replace: "
        "make TMPDIR name one of a short path that only this user can write to"
    )


def _is_ours(folder: Path) -> bool:
    try:
        return os.name != "posix" or folder.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
