"""An arm64 Debian in a folder, whose programs run here by qemu's user-mode emulation.

Nothing is installed, and nothing needs root: apt downloads into a folder of its own, and the
emulator is registered in a user namespace that ends with the program.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHARED = "/shared"
"""Where a program sees the folder that it was given."""
PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
"""Releases of Debian, as Raspberry Pi OS has them, and their Python."""
_EMULATOR = ("trixie", "qemu-user")  # 7.2 crashes as soon as onnxruntime is imported
_PACKAGES = ("python3-venv", "libstdc++6")
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_PATH = f"{os.defpath}:/sbin:/usr/sbin"
# As in /usr/lib/binfmt.d: the head of an ELF file for aarch64, and which of its bits count.
_MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
_ENTER = f"""
root=$1 emulator=$2 shared=$3
shift 3
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf %s ':arm64:M::{_MAGIC}:{_MASK}:'"$emulator:F" > /proc/sys/fs/binfmt_misc/register
for each in proc sys dev; do mount --rbind "/$each" "$root/$each"; done
mount --bind "$shared" "$root{SHARED}"
exec chroot "$root" "$@"
"""


class CannotEmulate(RuntimeError):
    """What is missing on this machine, and what to do."""


@dataclass(frozen=True)
class Emulated:
    """The other machine's files, and what runs them."""

    root: Path
    emulator: Path

    def run(self, command: Sequence[str], *, core: str, shared: Path) -> str:
        """What a program of the root prints, on such a core; its errors are shown as they come.

        Raises CalledProcessError.
        """
        entered = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-euc", _ENTER, "sh"]
        return subprocess.run(
            [*entered, *map(str, (self.root, self.emulator, shared)), *command],
            env={"PATH": _PATH, "HOME": "/tmp", "QEMU_CPU": core, "ORT_DISABLE_TELEMETRY": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout


def prepared(folder: Path, suite: str, mirror: str | None) -> Emulated:
    """A release of Debian in a folder, unpacked where it is not there. Raises CannotEmulate."""
    needed = {"apt-get": "apt", "dpkg-deb": "dpkg", "unshare": "util-linux"}
    if lacking := {needed[each] for each in needed if shutil.which(each, path=_PATH) is None}:
        raise CannotEmulate(f"on Debian or Ubuntu, install {', '.join(sorted(lacking))} first")
    folder.mkdir(parents=True, exist_ok=True)
    here = _said("dpkg", "--print-architecture").strip()
    _unpack(folder / suite, suite, "arm64", _PACKAGES, mirror)
    _unpack(folder / "emulator", _EMULATOR[0], here, _EMULATOR[1:], mirror)
    found = Emulated(folder / suite, folder / "emulator" / "usr" / "bin" / "qemu-aarch64")
    try:
        found.run(["/usr/bin/python3", "-c", ""], core="max", shared=folder)
    except subprocess.CalledProcessError as error:
        raise CannotEmulate(
            "no program of arm64 starts, as said above. It takes Linux 6.7 or newer and leave to "
            "make user namespaces: try it as root, or in a container with --privileged. If all of "
            f"that is there, remove {folder}, and it is unpacked anew"
        ) from error
    return found


def _unpack(
    into: Path, suite: str, architecture: str, packages: Sequence[str], mirror: str | None
) -> None:
    """Debian's packages with what they depend on, in a folder that is whole or not there."""
    if into.exists():
        return
    if not Path(_KEYS).exists():
        raise CannotEmulate(f"there is no {_KEYS}: install debian-archive-keyring")
    if (free := shutil.disk_usage(into.parent).free / 1e6) < 1000:
        raise CannotEmulate(f"{into.parent} has {free:,.0f} MB free of the 1,000 that it takes")
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        state, root = Path(scratch) / "apt", Path(scratch) / "root"
        (state / "lists" / "partial").mkdir(parents=True)
        (state / "archives" / "partial").mkdir(parents=True)
        (state / "status").touch()
        Path(scratch).chmod(0o755)  # where root runs apt, a user of its own downloads
        source = f"deb [arch={architecture} signed-by={_KEYS}] {mirror or _mirror()} {suite} main\n"
        (state / "sources.list").write_text(source, encoding="utf-8")
        options = f"""\
APT::Architecture={architecture}
APT::Architectures={architecture}
APT::Install-Recommends=false
APT::Update::Error-Mode=any
Debug::NoLocking=true
Dir::State={state}
Dir::State::lists={state}/lists
Dir::State::status={state}/status
Dir::Cache={state}
Dir::Cache::archives={state}/archives
Dir::Etc::sourcelist={state}/sources.list
Dir::Etc::sourceparts=/dev/null
Dir::Etc::preferencesparts=/dev/null"""
        apt = ["apt-get", "-qq", *(f"-o{each}" for each in options.splitlines())]
        _said(*apt, "update")
        _said(*apt, "install", "--download-only", "--yes", *packages)
        for each in ("bin", "lib", "sbin"):  # links, which no package here makes
            (root / "usr" / each).mkdir(parents=True)
            (root / each).symlink_to(f"usr/{each}")
        for package in sorted((state / "archives").glob("*.deb")):
            _said("dpkg-deb", "--extract", str(package), str(root))
        for each in ("proc", "sys", "dev", "tmp", "shared"):
            (root / each).mkdir(exist_ok=True)
        # What ca-certificates does when it is installed; pip does not start without.
        authorities = sorted((root / "usr" / "share" / "ca-certificates").rglob("*.crt"))
        (root / "etc" / "ssl" / "certs").mkdir(parents=True, exist_ok=True)
        bundle = root / "etc" / "ssl" / "certs" / "ca-certificates.crt"
        bundle.write_bytes(b"".join(each.read_bytes() for each in authorities))
        root.rename(into)


def _mirror() -> str:
    """Where this machine's apt has Debian from."""
    told = _said("apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)")
    found = re.search(r"^Debian (?!.*security)(\S+)$", told, re.MULTILINE)
    if found is None:
        raise CannotEmulate("apt knows no mirror of Debian: `apt-get update`, or say --mirror URL")
    return found[1]


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotEmulate(
            f"`{command[0]} ... {command[-1]}` failed with {done.returncode}; are the network "
            f"there, and room on the disk?\n{(done.stdout + done.stderr).strip()[-2000:]}"
        )
    return done.stdout
