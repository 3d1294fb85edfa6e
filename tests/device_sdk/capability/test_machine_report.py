"""The machine report, on this machine and on made-up ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from device_sdk.capability.machine import (
    cpu_quota,
    describe_machine,
    memory_limit,
    usable_cores,
)


def made_up(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_this_machine() -> None:
    machine = describe_machine(threads=1, provider="CPUExecutionProvider")
    assert machine.cpu_model
    assert 0.0 < machine.cores <= (os.cpu_count() or 1)
    assert set(machine.versions) == {"python", "numpy", "onnxruntime", "tessera"}
    assert machine.versions["python"].startswith(f"{sys.version_info.major}.")
    if sys.platform == "linux":
        assert machine.memory_total_bytes is not None
        assert machine.memory_available_bytes is not None
        assert 0 < machine.memory_available_bytes <= machine.memory_total_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' files")
def test_a_raspberry_pi_in_a_container(tmp_path: Path) -> None:
    root = made_up(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 108.00\n\nModel\t\t: Raspberry Pi 4\n",
            "proc/meminfo": "MemTotal:  4000 kB\nMemAvailable:  3000 kB\n",
            "proc/self/cgroup": "0::/app/job\n",
            "sys/fs/cgroup/app/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/app/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/app/memory.max": "1024000\n",
            "sys/fs/cgroup/app/job/memory.max": "max\n",
        },
    )
    machine = describe_machine(threads=1, provider="CPUExecutionProvider", root=root)
    assert machine.cpu_model == "Raspberry Pi 4"
    assert machine.cores == 0.5
    assert machine.memory_total_bytes == 1_024_000
    assert machine.memory_available_bytes == 1_024_000


def test_quota_of_control_groups_version_1(tmp_path: Path) -> None:
    root = made_up(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpuacct,cpu:/docker/abc\n2:memory:/docker/abc\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "4096\n",
        },
    )
    assert cpu_quota(root) == 1.5
    assert memory_limit(root) == 4096


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "nonsense\n::\n0::/../../etc\n"},
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max\n"},
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "5 0\n"},
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "\xff\n"},
        {"proc/meminfo": "MemTotal: lots\n:::\n", "proc/cpuinfo": ":\nmodel name\n"},
    ],
)
def test_files_that_say_nothing_are_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    root = made_up(tmp_path, files)
    assert cpu_quota(root) is None
    assert memory_limit(root) is None
    assert usable_cores(root) >= 1.0
    assert describe_machine(threads=1, provider="x", root=root).cpu_model
