"""Machines of one's own: network namespaces, joined to this one by links that can be cut."""

from __future__ import annotations

import ctypes
import math
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

_PREFIX = "tsr"
_NET = 0x40000000  # CLONE_NEWNET
_MOST_TRIES = 50
_numbers = count()
"""Of what this process has made: the kernel takes its time to take down what is deleted, so that
nothing new may have an old name."""


def missing() -> str:
    """Why there can be none here; empty if there can."""
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = f"{_PREFIX}{os.getpid()}"
    try:
        _ip("netns", "add", tried)
        _ip("netns", "delete", tried)
    except OSError as error:
        return f"this kernel makes no network namespaces: {error}"
    return ""


class Network:
    """A switch, with an address of this namespace on it: servers that listen to all of this
    machine's addresses are reached there."""

    def __init__(self, device: str, subnet: str) -> None:
        self.device, self._subnet = device, subnet
        self.address = f"{subnet}.1"
        self._given = 1

    def take_address(self) -> str:
        """One that nobody has yet."""
        self._given += 1
        return f"{self._subnet}.{self._given}"


class Machine:
    """A network namespace with a cable to each of some networks. ``name``: for ``ip netns``."""

    def __init__(self, name: str, cables: dict[str, str], addresses: dict[str, str]) -> None:
        self.name = name
        self._cables = cables
        self._joined = dict.fromkeys(cables, 0.0)
        self.addresses = addresses
        """By network: its own."""

    def command(self, program: Sequence[str]) -> list[str]:
        """A command that runs the program there."""
        return ["ip", "netns", "exec", self.name, *program]

    def enter(self) -> None:
        """This process, which must have no other threads yet, is there from now on."""
        enter(self.name)

    def cut(self, network: str) -> None:
        """Nothing passes any more, and nobody is told: as when a cable is pulled at the switch."""
        self._joined[network] = math.inf
        _ip("link", "set", self._cables[network], "down")

    def heal(self, network: str) -> None:
        _ip("link", "set", self._cables[network], "up")
        if self._joined[network] == math.inf:
            self._joined[network] = time.monotonic()

    def joined_since(self, network: str) -> float:
        """Monotonic seconds; infinity while the cable is pulled."""
        return self._joined[network]

    def holds(self, process: int) -> bool:
        """Whether that process is there."""
        try:
            return Path(f"/proc/{process}/ns/net").stat().st_ino == _space(self.name).stat().st_ino
        except FileNotFoundError:
            return False


def enter(name: str) -> None:
    """See :meth:`Machine.enter`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with _space(name).open() as namespace:
        if libc.setns(namespace.fileno(), _NET):
            raise OSError(ctypes.get_errno(), f"the network namespace {name} cannot be entered")


def _space(name: str) -> Path:
    return Path(f"/run/netns/{name}")


@contextmanager
def machines(
    names: Sequence[str], networks: Sequence[str]
) -> Iterator[tuple[dict[str, Machine], dict[str, Network]]]:
    """Machines by name, each with a cable to each of the networks, until the block ends."""
    _remove_forgotten()
    tag = f"{_PREFIX}{os.getpid()}"
    with ExitStack() as stack:
        made: dict[str, Network] = {}
        for network in networks:
            device = f"{tag}b{next(_numbers)}"
            _ip("link", "add", device, "type", "bridge")
            stack.callback(_ip, "link", "delete", device)
            made[network] = _attach(device)
        found = {}
        for name in names:
            space = f"{tag}n{next(_numbers)}"
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "delete", space)
            _ip("-n", space, "link", "set", "lo", "up")
            cables, addresses = {}, {}
            for number, network in enumerate(networks):
                cable, address = f"{tag}c{next(_numbers)}", made[network].take_address()
                end = f"eth{number}"
                peer = ("peer", "name", end, "netns", space)
                _ip("link", "add", cable, "type", "veth", *peer)
                _ip("link", "set", cable, "master", made[network].device, "up")
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
                _ip("-n", space, "link", "set", end, "up")
                cables[network], addresses[network] = cable, address
            found[name] = Machine(space, cables, addresses)
        yield found, made


def _attach(device: str) -> Network:
    """Give a bridge an address in a subnet that nothing of this machine is in."""
    taken = _ip("-o", "-4", "addr", "show") + _ip("route", "show", "table", "all")
    for _ in range(_MOST_TRIES):
        subnet = f"10.{64 + secrets.randbelow(128)}.{secrets.randbelow(256)}"
        if f"{subnet}." not in taken:
            break
    network = Network(device, subnet)
    _ip("addr", "add", f"{network.address}/24", "dev", device)
    _ip("link", "set", device, "up")
    return network


def _remove_forgotten() -> None:
    """What processes left that were killed."""
    for line in [*_ip("netns", "list").splitlines(), *_ip("-br", "link").splitlines()]:
        name = line.split()[0].partition("@")[0]
        ours = re.fullmatch(rf"{_PREFIX}(\d+)([bcn])\d+", name)
        if ours is None or Path(f"/proc/{ours[1]}").exists():
            continue
        what = "netns" if ours[2] == "n" else "link"
        subprocess.run(["ip", what, "delete", name], check=False, capture_output=True)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()} ({done.returncode})")
    return done.stdout
