"""Strangers, other users of the machine among them, reach no Ray that is told the fleet's keys."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from aggregator.cluster.joined_ray import (
    is_lasting,
    is_private,
    require_private_token,
)
from aggregator.errors import AggregatorError
from tests.fakes.ray_head import ray_head
from tests.fakes.waiting import PATIENCE_SECONDS

pytest.importorskip("ray")
as_root = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can try it as another user"
)

_JOINS = """
import sys
from aggregator.cluster.joined_ray import JoinedRay
from aggregator.errors import AggregatorError
joined = JoinedRay(sys.argv[1] or None, 1, log_to_driver=False)
try:
    joined.join()
except AggregatorError as error:
    print(error, flush=True)
else:
    @joined.ray.remote
    class Worker:
        def answers(self):
            return True
    worker = Worker.remote()
    assert joined.ray.get(worker.answers.remote())
    print("joined", joined.ray.get_runtime_context().get_temp_dir(), flush=True)
    sys.stdin.read()
joined.leave()
"""

# What can be done with each of some paths, which come on standard input.
_TRIES = """
import json, os, socket, stat, sys
def ways(path):
    def connect():
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
    tries = {
        "seen": lambda: os.lstat(path),
        "connected": connect,
        "read": lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)),
        "written": lambda: os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)),
    }
    for way, attempt in tries.items():
        try:
            attempt()
        except OSError:
            continue
        yield way
print(json.dumps({path: list(ways(path)) for path in json.load(sys.stdin)}))
"""


@contextmanager
def _joining(address: str, environment: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """A process that joins, or says why not: its id, and what it said."""
    with subprocess.Popen(
        [sys.executable, "-c", _JOINS, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(environment),
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.pid, process.stdout.readline().strip()
            process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()


@pytest.fixture
def here() -> Iterator[Path]:
    """A folder of a short path, as sockets need it, and nobody else's."""
    folder = Path(tempfile.mkdtemp(prefix="u", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _environment(here: Path, **more: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return {**plain, "HOME": str(here), "RAY_USAGE_STATS_ENABLED": "0", **more}


def _ways_of_nobody(paths: list[str]) -> dict[str, list[str]]:
    """What the user nobody can do with each."""
    nobody = pwd.getpwnam("nobody")
    said = subprocess.run(
        # The system's: the one that runs the tests may lie where nobody else comes.
        ["/usr/bin/env", "-i", "python3", "-I", "-c", _TRIES],
        input=json.dumps(paths),
        capture_output=True,
        text=True,
        check=True,
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=(),
        cwd="/",
        timeout=PATIENCE_SECONDS,
    )
    found: dict[str, list[str]] = json.loads(said.stdout)
    return found


def _below(folder: Path) -> list[str]:
    return [str(folder), *(str(each) for each in folder.rglob("*"))]


@as_root
def test_another_user_reaches_nothing_of_a_ray_of_its_own(here: Path) -> None:
    """Ray makes its folders open to all: a log there could become a link to any file of ours."""
    with _joining("", _environment(here, RAY_AUTH_MODE="disabled")) as (pid, said):
        word, _, folder = said.partition(" ")
        assert word == "joined", said
        paths = _below(Path(folder))
        assert any("/sockets/" in path for path in paths)
        assert any("/logs/" in path for path in paths)
        assert _ways_of_nobody(paths) == {path: [] for path in paths}
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        listening = {
            connection.laddr.ip.removeprefix("::ffff:")
            for each in processes
            for connection in each.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        token = psutil.Process(pid).children()[0].environ()["RAY_AUTH_TOKEN"]
        assert psutil.Process(pid).children()[0].environ()["RAY_AUTH_MODE"] == "token"
        assert not [each for each in processes if token in " ".join(each.cmdline())]
        environs = [f"/proc/{each.pid}/environ" for each in processes]
        assert _ways_of_nobody(environs) == {path: ["seen"] for path in environs}
    assert not Path(folder).parent.exists()


@as_root
def test_what_another_user_reaches_is_found(here: Path) -> None:
    """The try itself: in a folder that is open to all it finds all there is."""
    opened = here / "opened"
    opened.mkdir()
    log, place = opened / "log", opened / "socket"
    log.write_text("")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        server.listen()
        for each in (here, opened, log, place):
            each.chmod(0o777)
        found = _ways_of_nobody([str(opened), str(log), str(place)])
    assert list(found.values()) == [
        ["seen", "read"],
        ["seen", "read", "written"],
        ["seen", "connected"],
    ]


def test_a_cluster_that_asks_for_no_token_is_refused(here: Path) -> None:
    environment = _environment(here, RAY_AUTH_MODE="disabled")
    with ray_head(environment, here) as address:
        for more in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
            with _joining(address, _environment(here, **more)) as (_, said):
                assert "needs no token" in said
                assert "RAY_AUTH_MODE=token" in said and "docs/cluster.md" in said


def test_a_cluster_whose_folder_is_open_is_refused_and_one_that_is_closed_joined(
    here: Path,
) -> None:
    token = secrets.token_hex(32)
    environment = _environment(here, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    with ray_head(environment, here) as address:
        file = here / "token"
        file.write_text(token)
        file.chmod(0o644)
        named = _environment(here, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(file))
        with _joining(address, named) as (_, said):
            assert "others can read Ray's token" in said and "chmod 600" in said
        file.chmod(0o600)
        with _joining(address, named) as (_, said):
            assert said == f"joined {here / 'r'}"
        here.chmod(0o755)
        with _joining(address, environment) as (_, said):
            assert f"other users of this machine reach Ray's folder {here / 'r'}" in said
            assert "--temp-dir" in said


@pytest.mark.skipif(os.name != "posix", reason="modes of folders are POSIX's")
def test_a_folder_is_private_below_one_that_lets_nobody_in(here: Path) -> None:
    inner = here / "a" / "b"
    inner.mkdir(parents=True)
    assert is_private(inner) and is_private(here)
    for mode in (0o777, 0o1777, 0o755, 0o750, 0o711):
        here.chmod(mode)
        assert not is_private(inner)
        assert is_lasting(inner) == (mode != 0o777)
    here.chmod(0o755)
    (here / "a").chmod(0o700)
    assert is_private(inner)
    # A link to one that is open leads there.
    opened = here / "opened"
    opened.mkdir()
    (here / "a" / "link").symlink_to(opened)
    assert not is_private(here / "a" / "link")


@as_root
def test_a_folder_of_somebody_else_is_not_private(here: Path) -> None:
    inner = here / "theirs"
    inner.mkdir(mode=0o700)
    here.chmod(0o755)
    assert is_private(inner)
    nobody = pwd.getpwnam("nobody")
    os.chown(inner, nobody.pw_uid, nobody.pw_gid)
    assert not is_private(inner) and not is_lasting(inner)


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_a_token_that_others_can_read_is_refused(here: Path) -> None:
    path = here / ".ray" / "auth_token"
    require_private_token({}, here)
    path.parent.mkdir()
    path.write_text("x" * 64)
    path.chmod(0o644)
    require_private_token({"RAY_AUTH_TOKEN": "y" * 64}, here)
    with pytest.raises(AggregatorError, match="chmod 600"):
        require_private_token({}, here)
    path.chmod(0o600)
    require_private_token({}, here)
