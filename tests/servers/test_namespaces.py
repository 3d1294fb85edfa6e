"""A cable that is cut carries nothing and says nothing; healed, it carries what waited."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.fakes.waiting import PATIENCE_SECONDS
from tests.servers.namespaces import machines, missing

# Sends a byte for each line that it is told, and says so.
_SENDER = """
import socket, sys
server = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for line in sys.stdin:
    server.sendall(line[:1].encode())
    print("sent", flush=True)
"""


def test_a_cut_cable_holds_back_what_is_sent_until_it_is_healed() -> None:
    if reason := missing():
        pytest.skip(reason)
    with (
        machines(["far"], ["net", "other"]) as (made, networks),
        socket.create_server((networks["net"].address, 0)) as listener,
    ):
        port = str(listener.getsockname()[1])
        program = [sys.executable, "-c", _SENDER, networks["net"].address, port]
        sender = subprocess.Popen(
            made["far"].command(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert sender.stdin is not None and sender.stdout is not None

        def send(byte: str) -> None:
            assert sender.stdin is not None and sender.stdout is not None
            sender.stdin.write(f"{byte}\n")
            sender.stdin.flush()
            assert sender.stdout.readline() == "sent\n"

        try:
            listener.settimeout(PATIENCE_SECONDS)
            connection, (address, _) = listener.accept()
            assert address == made["far"].addresses["net"]
            with connection:
                connection.settimeout(PATIENCE_SECONDS)
                made["far"].cut("other")
                send("a")
                assert connection.recv(1) == b"a"
                made["far"].cut("net")
                send("b")  # the kernel takes it
                connection.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                made["far"].heal("net")
                connection.settimeout(PATIENCE_SECONDS)
                assert connection.recv(1) == b"b"
        finally:
            sender.kill()
            sender.wait()
            sender.stdin.close()
            sender.stdout.close()
