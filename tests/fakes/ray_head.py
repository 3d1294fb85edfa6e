"""A head of Ray's, in a process of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.waiting import PATIENCE_SECONDS, wait_until


@contextmanager
def ray_head(environment: Mapping[str, str], folder: Path, cores: int = 4) -> Iterator[str]:
    """A Ray cluster of one node; its address. ``folder``: of a short path, as sockets need it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "ray.log"
    ray = str(Path(sys.executable).with_name("ray"))
    with log.open("wb") as output:
        options = [
            "--head",
            "--block",
            f"--port={port}",
            f"--temp-dir={folder / 'r'}",
            f"--num-cpus={cores}",
        ]
        head = subprocess.Popen(
            [ray, "start", *options, "--include-dashboard=false", "--node-ip-address=127.0.0.1"],
            stdout=output,
            stderr=output,
            env=dict(environment),
            cwd="/",
        )
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text(), log.read_text)
        yield f"127.0.0.1:{port}"
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(PATIENCE_SECONDS)
