"""This process in a Ray cluster, or in a Ray of its own on this machine."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from aggregator.errors import AggregatorError
from device_sdk.system.signals import held_signals

_LOG = logging.getLogger(__name__)
_REACH_SECONDS = 5.0
_JOIN_SECONDS = 60.0
_START_SECONDS = 300.0
_LOOK_SECONDS = 0.05
_MOST_FOLDER_BYTES = 40


class JoinedRay:
    """``address``: ``HOST:PORT`` of a running cluster's head; None: a Ray of our own with ``cores``
    to give away, which ends with us and leaves nothing behind. ``log_to_driver``: whether what its
    actors log is shown here.

    Attributes:
        ray: the module, once :meth:`join` was called.
    """

    def __init__(self, address: str | None, cores: int, *, log_to_driver: bool) -> None:
        self.ray: Any = None
        self.own = address is None
        self._address, self._cores, self._log_to_driver = address, cores, log_to_driver
        self._folder: str | None = None

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
        if self.own and "RAY_AUTH_MODE" not in os.environ:
            # Else it makes one in the user's home, and leaves it there.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        if "RAY_AUTH_TOKEN" in os.environ:
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
            self._folder = _short_folder()
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
            threading.Thread(target=work, name="tessera-ray", daemon=True).start()
            while not found and time.monotonic() < until_seconds:
                if asked_to_end() and not asked:
                    asked = True
                    if self._address is not None:
                        return False
                    _LOG.info("asked to end: as soon as Ray has started")
                time.sleep(_LOOK_SECONDS)
        error = found[0] if found else TimeoutError(f"it does not answer within {seconds:.0f} s")
        if error is None:
            return not asked
        said = first_line(error)
        raise AggregatorError(
            f"a Ray of its own cannot be started here: {said}. See docs/cluster.md"
            if self._address is None
            else f"the Ray cluster at {self._address} cannot be joined: {said}. Is it running, of "
            "the same version, with the same token, and does the address name its head?"
        ) from None

    def _init(self) -> None:
        common: dict[str, Any] = {
            "log_to_driver": self._log_to_driver,
            "logging_level": logging.ERROR,
            "configure_logging": False,
        }
        if self._address is not None:
            self.ray.init(self._address, **common)
            return
        self.ray.init(
            "local",
            include_dashboard=False,
            _temp_dir=self._folder,
            num_cpus=self._cores,
            object_store_memory=256 << 20,
            **common,
        )

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


def _short_folder() -> str:
    """Ray's sockets lie some 60 bytes below it, and a socket's path has 107 at most. What processes
    left that were killed is removed."""
    prefix = "tessera-ray-"
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        for each in Path(place).glob(f"{prefix}*"):
            owner = each.name.removeprefix(prefix).partition("-")[0]
            if owner.isdecimal() and not _lives(int(owner)):
                shutil.rmtree(each, ignore_errors=True)
    prefix += f"{os.getpid()}-"
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(folder) > _MOST_FOLDER_BYTES:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix=prefix, dir="/tmp")
    return folder


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
