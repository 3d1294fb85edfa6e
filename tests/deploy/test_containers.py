"""What runs in containers is what the product has: commands, ports, paths, files, settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aggregator.cli import main
from aggregator.serve.metrics import Snapshot, Told, answers
from aggregator.task.file import read_task
from tests.brokers.authority import Authority
from tests.brokers.mosquitto import EXECUTABLE as MOSQUITTO
from tests.brokers.mosquitto import Mosquitto, free_port, password_file, running
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
PORT = 9464

Found = Mapping[str, Any]


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def pods() -> Iterator[tuple[str, Found]]:
    """Each pod that the manifests describe, with a name for messages."""
    for name in ("aggregator.yaml", "cluster.yaml"):
        for document in documents(name):
            yield from _pods_below(document, f"{name}: {document['kind']}")


def _pods_below(found: Any, name: str) -> Iterator[tuple[str, Found]]:
    if isinstance(found, dict):
        if "containers" in found:
            yield f"{name} of {found['containers'][0]['name']}", found
        for each in found.values():
            yield from _pods_below(each, name)
    elif isinstance(found, list):
        for each in found:
            yield from _pods_below(each, name)


PODS = dict(pods())


def containers(pod: Found) -> list[Any]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def as_argv(line: str) -> list[str]:
    """The command line of ``tessera-aggregator`` in a line of a shell, without the program."""
    (found,) = re.findall(r"tessera-aggregator (.+?)(?: &&|; |$)", line)
    return shlex.split(found)


def command_lines() -> dict[str, list[str]]:
    """What ``tessera-aggregator`` is started with, and where that stands."""
    (default,) = re.findall(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE)
    services = COMPOSE["services"]
    found = {
        "Dockerfile": json.loads(default),
        "compose aggregator": services["aggregator"]["command"],
        "compose init": as_argv(services["init"]["command"][0]),
    }
    for name, pod in PODS.items():
        for each in containers(pod):
            command, arguments = each.get("command"), each.get("args")
            if command == ["tessera-aggregator"]:
                found[f"{name}, {each['name']}"] = arguments
            elif command is not None:
                assert command == ["sh", "-c"]
                found[f"{name}, {each['name']}"] = as_argv(arguments[0])
    return found


@pytest.mark.parametrize(("where", "argv"), command_lines().items(), ids=[*command_lines()])
def test_each_command_is_one_of_the_product(where: str, argv: list[str]) -> None:
    assert main.parsed(argv).home, where


def test_the_entry_point_and_the_user_of_the_image_are_those_that_pods_name() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.MULTILINE)
    assert set(json.loads(entry)) <= set(scripts)
    (user,) = re.findall(r"useradd --uid (\d+)", DOCKERFILE)
    assert f"USER {user}:{user}\n" in DOCKERFILE
    for name, pod in PODS.items():
        security = pod["securityContext"]
        assert {security[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {int(user)}, (
            name
        )


def test_the_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    page = (ROOT / "docs" / "operating" / "containers.md").read_text()
    named = re.findall(r"EXTRAS=([a-z,]+)", DOCKERFILE + page)
    assert len(named) >= 3
    assert {extra for each in named for extra in each.split(",")} <= set(extras)


def test_what_is_installed_can_run_the_console() -> None:
    pages = [
        (ROOT / "docs" / "operating" / f"{each}.md").read_text()
        for each in ("deploy", "containers")
    ]
    installed = re.findall(
        r"EXTRAS=([a-z,]+)|tessera-edge\[([a-z,]+)\]", "".join([DOCKERFILE, *pages])
    )
    assert len(installed) == 4
    for each in map("".join, installed):
        assert {"aggregator", "console"} <= set(each.split(",")), each


@pytest.mark.parametrize("pod", PODS.values(), ids=[*PODS])
def test_pods_are_confined_and_mount_what_they_have(pod: Found) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {each["name"] for each in pod["volumes"]}
    for container in containers(pod):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted <= volumes | {"home"}
        assert "/tmp" in {each["mountPath"] for each in container["volumeMounts"]}


def test_services_of_compose_are_confined() -> None:
    for service in COMPOSE["services"].values():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert set(service["secrets"]) <= set(COMPOSE["secrets"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            here = source.startswith((".", "/"))
            assert (DEPLOY / source).exists() if here else source in COMPOSE["volumes"], volume


def test_probes_ask_what_the_port_answers() -> None:
    probes = [
        container[kind]["httpGet"]
        for pod in PODS.values()
        for container in pod["containers"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        if "httpGet" in container.get(kind, {})
    ]
    assert len(probes) == 3 and {each["port"] for each in probes} == {"metrics"}
    (asked,) = re.findall(r"http://127.0.0.1:(\d+)(/\w+)", json.dumps(COMPOSE["services"]))
    assert asked[0] == str(PORT)
    port = answers(Told(lambda: Snapshot(True, "mqtt://h", 1, 1, 1, 1, ())), None)
    said: list[str] = []
    paths = {asked[1], *(each["path"] for each in probes)}
    for path in paths:
        list(port({"PATH_INFO": path}, lambda status, *_: said.append(status)))  # type: ignore
    assert said == ["200 OK"] * len(paths)


def task_files() -> dict[str, tuple[str, str]]:
    """The task file and the catalogue of each way to run it."""
    (data,) = (each["data"] for each in documents("aggregator.yaml") if each["kind"] == "ConfigMap")
    fleet = DEPLOY / "compose" / "fleet"
    return {
        "compose": ((fleet / "task.toml").read_text(), (fleet / "items.tsv").read_text()),
        "kubernetes": (data["task.toml"], data["items.tsv"]),
    }


@pytest.mark.parametrize("way", ["compose", "kubernetes"])
def test_the_task_file_is_one_and_names_the_port_that_is_asked(way: str, tmp_path: Path) -> None:
    text, items = task_files()[way]
    folders = ("/etc/tessera-secrets", "/etc/tessera", "/run/secrets")
    for folder in folders:
        text = text.replace(f'"{folder}/', f'"{tmp_path}/')
    (tmp_path / "items.tsv").write_text(items)
    (tmp_path / "broker-password").write_text("secret\n")
    Authority(tmp_path).ca_file.rename(tmp_path / "ca.pem")
    (tmp_path / "task.toml").write_text(text)
    fleet = read_task(tmp_path / "task.toml").fleet
    # Of the container's addresses, not its own loopback interface, from where nobody asks.
    assert (fleet.metrics.port, fleet.metrics.address) == (PORT, "0.0.0.0")


def test_ports_are_the_same_everywhere() -> None:
    assert COMPOSE["services"]["aggregator"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    found = {each["kind"]: each["spec"] for each in documents("aggregator.yaml") if "spec" in each}
    (port,) = found["Service"]["ports"]
    (container,) = found["StatefulSet"]["template"]["spec"]["containers"]
    assert port["targetPort"] == "metrics" and port["port"] == PORT
    assert container["ports"] == [{"name": "metrics", "containerPort": PORT}]
    (allowed,) = found["NetworkPolicy"]["ingress"][0]["ports"]
    assert allowed["port"] == PORT
    (broker,) = re.findall(r'url = "mqtts://\S+:(\d+)"', task_files()["kubernetes"][0])
    out = [each["port"] for rule in found["NetworkPolicy"]["egress"] for each in rule["ports"]]
    assert sorted(out) == [53, 53, int(broker)]


# The cluster.


def ray_pods() -> list[Any]:
    found = [pod for name, pod in PODS.items() if name.startswith("cluster.yaml")]
    assert len(found) == 3
    return [pod["containers"][0] for pod in found]


def test_all_of_the_cluster_has_the_same_token_certificates_and_folder() -> None:
    environments = [
        {each["name"]: each for each in container["env"] if each["name"].startswith("RAY_")}
        for container in ray_pods()
    ]
    assert environments[0] == environments[1] == environments[2]
    assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USE_TLS"} <= environments[0].keys()
    mounts = [
        {each["name"]: each["mountPath"] for each in one["volumeMounts"]} for one in ray_pods()
    ]
    assert len({each["ray"] for each in mounts}) == 1
    # Ray opens its folder to all: the one above it, of the image, is closed.
    assert "install -d -m 700" in DOCKERFILE
    assert Path(mounts[0]["ray"]).parent == Path("/var/lib/tessera")


def ray_groups() -> list[Any]:
    """Of the Ray cluster: the head, and the workers."""
    (cluster,) = (one["spec"] for one in documents("cluster.yaml") if one["kind"] == "RayCluster")
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_ray_knows_what_it_is_started_with() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="ray is not installed")
    known = {option for each in scripts.start.params for option in each.opts}
    groups = ray_groups()
    asked = {f"--{key}" for group in groups for key in group["rayStartParams"]}
    (line,) = ray_pods()[2]["args"]
    asked |= set(re.findall(r"--[a-z-]+", line.split("&&")[0]))
    assert asked and asked <= known
    folders = {group["rayStartParams"]["temp-dir"] for group in groups}
    assert folders == set(re.findall(r"--temp-dir (\S+)", line))


def test_each_probe_of_ray_asks_a_port_that_ray_has() -> None:
    groups = ray_groups()
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        opened = {6379, int(group["rayStartParams"]["node-manager-port"])}
        for kind in ("livenessProbe", "readinessProbe"):
            assert container[kind]["tcpSocket"]["port"] in opened


# What the containers do, done here.


def in_the_container(folder: Path, port: int, metrics: int) -> Mapping[str, str]:
    """Where the containers' paths, names and ports are here."""
    return {
        "/run/secrets": str(folder / "secrets"),
        "/mosquitto/config/tessera.acl": str(ROOT / "aggregator" / "acl.template"),
        "/mosquitto/data/": f"{folder}/",
        "/etc/tessera": str(folder / "etc"),
        "mqtts://mosquitto:8883": f"mqtts://127.0.0.1:{port}",
        "port = 9464": f"port = {metrics}",
        "127.0.0.1:9464": f"127.0.0.1:{metrics}",
        'address = "0.0.0.0"': 'address = "127.0.0.1"',
    }


def moved(text: str, places: Mapping[str, str]) -> str:
    for there, here in places.items():
        text = text.replace(there, here)
    return text


@contextmanager
def compose_up(folder: Path, places: Mapping[str, str], port: int) -> Iterator[Path]:
    """Both services as compose.yaml has them, on this machine; the folder of the volume."""
    secrets, etc, volume = folder / "secrets", folder / "etc", folder / "volume"
    for each in (secrets, etc, volume):
        each.mkdir()
    authority = Authority(secrets)
    certificate, key = authority.issue("server")
    authority.ca_file.rename(secrets / "ca.pem")
    assert (certificate.name, key.name) == ("server.pem", "server.key")
    password_file(secrets / "passwords", {"tessera-aggregator": "server"})
    (secrets / "broker-password").write_text("server\n")
    shutil.copy(DEPLOY / "compose" / "fleet" / "items.tsv", etc)
    (etc / "task.toml").write_text(
        moved((DEPLOY / "compose" / "fleet" / "task.toml").read_text(), places)
    )
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    program = programs / "tessera-aggregator"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m aggregator.cli "$@"\n')
    program.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}

    lines = moved((DEPLOY / "compose" / "mosquitto.conf").read_text(), places).splitlines()
    broker = Mosquitto(folder, [each for each in lines if each != "listener 8883"], port)
    services = COMPOSE["services"]
    first = [*services["init"]["entrypoint"], moved(services["init"]["command"][0], places)]
    with running(broker):
        for _ in range(2):  # at the second start the home is there
            subprocess.run(first, cwd=volume, env=environment, check=True, timeout=PATIENCE_SECONDS)
        serve = [*services["aggregator"]["entrypoint"], *services["aggregator"]["command"]]
        with (folder / "log").open("wb") as log:
            served = subprocess.Popen(serve, cwd=volume, env=environment, stdout=log, stderr=log)
        try:
            yield volume
            served.terminate()
            assert served.wait(PATIENCE_SECONDS) == 0
        finally:
            served.kill()
            served.wait()


@pytest.mark.slow
def test_what_compose_starts_begins_serves_and_is_healthy(tmp_path: Path) -> None:
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed (apt-get install mosquitto)")
    port, metrics = free_port(), free_port()
    places = in_the_container(tmp_path, port, metrics)
    kind, program, *check = COMPOSE["services"]["aggregator"]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    asked = [sys.executable, *(moved(each, places) for each in check)]

    def healthy() -> bool:
        done = subprocess.run(asked, capture_output=True, timeout=PATIENCE_SECONDS)
        return done.returncode == 0

    assert not healthy()
    with compose_up(tmp_path, places, port) as volume:
        log = tmp_path / "log"
        wait_until(healthy, log.read_text)
        wait_until(lambda: "connected to mqtts" in log.read_text(), log.read_text)
        assert (volume / "fleet" / "task.toml").readlink() == tmp_path / "etc" / "task.toml"
        assert (volume / "fleet").stat().st_mode & 0o777 == 0o700
    assert not healthy()


@pytest.mark.parametrize("wheels", [[], ["a", "b"]], ids=["none", "two"])
def test_the_image_says_that_it_takes_one_wheel(wheels: list[str], tmp_path: Path) -> None:
    for each in wheels:
        (tmp_path / f"tessera_edge-{each}.whl").touch()
    (step,) = re.findall(r"^ +(set -- .+?) && \\$", DOCKERFILE, re.MULTILINE)
    (guard,) = re.findall(r"^ +(\{ test .+\}) && \\$", DOCKERFILE, re.MULTILINE)
    line = f"{step} && {guard}".replace("/build/dist", str(tmp_path))
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert done.returncode == 1 and "has to hold one wheel" in done.stderr
