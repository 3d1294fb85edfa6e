"""Nodes of a Ray cluster of one's own, whose processes can be killed one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from tests.fakes.waiting import PATIENCE_SECONDS
from tests.servers.namespaces import Machine

_MARK = "TESSERA_TEST_NODE"
RAYLET, CONTROL_SERVICE = "raylet", "gcs_server"
_STORE_BYTES = 80 << 20


class RayNode:
    """``ray start``, which stays in the foreground. It ends by itself once one of its processes
    did, and can be started again, on the same port.

    Args:
        folder: of a short path, for all nodes of a cluster.
        port: of the head. ``head``: the IP address where the head is to be found.
        machine: where it runs; None: here. The one that runs here is the head.
        address: its own, IP.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        port: int,
        head: str,
        *,
        machine: Machine | None,
        address: str,
        cpus: int,
    ) -> None:
        self.is_head = machine is None
        self._name = f"{os.getpid()}-{address}"
        self.log = folder / f"ray-{address}.log"
        self._log_bytes = 0
        self._environment = {**environment, _MARK: self._name}
        options = [f"--num-cpus={cpus}", f"--node-ip-address={address}"]
        options += [f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats"]
        if machine is None:
            options += ["--head", f"--port={port}", f"--temp-dir={folder / 'r'}"]
            options += ["--include-dashboard=false"]
        else:
            options += [f"--address={head}:{port}"]
        ray = str(Path(sys.executable).with_name("ray"))
        program = [ray, "start", "--block", *options]
        self._program = program if machine is None else machine.command(program)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and do not wait for it: see :meth:`is_up`."""
        self.kill()
        self._log_bytes = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._program, stdout=log, stderr=log, env=self._environment
            )

    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def is_up(self) -> bool:
        """Whether it said that it runs, and does."""
        with self.log.open("rb") as log:
            log.seek(self._log_bytes)
            return b"Ray runtime started" in log.read() and not self.ended()

    def process(self, name: str) -> psutil.Process | None:
        """That of ``RAYLET`` or ``CONTROL_SERVICE``."""
        for each in self.processes():
            with contextlib.suppress(psutil.Error):
                if each.name() == name:
                    return each
        return None

    def workers(self) -> list[psutil.Process]:
        """The processes in which actors of ours live."""
        found = []
        for each in self.processes():
            with contextlib.suppress(psutil.Error):
                if (each.cmdline() or [""])[0].startswith("ray::WorkerActor"):
                    found.append(each)
        return found

    def processes(self) -> Iterator[psutil.Process]:
        """All that it started, and what these did, also those whose parents are gone."""
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if each.environ().get(_MARK) == self._name:
                    yield each

    def kill(self) -> None:
        """kill -9 of everything: a machine without power."""
        for _ in range(2):  # one that was being started when we looked
            for each in list(self.processes()):
                with contextlib.suppress(psutil.Error):
                    each.send_signal(signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_SECONDS)
            self._process = None
