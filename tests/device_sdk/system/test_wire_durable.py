"""Flushing files, on systems whose fsync does and on those whose does not."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from device_sdk.home.database import HomeDatabase
from device_sdk.system import files as durable

ROOT = Path(__file__).resolve().parents[3]
_F_FULLFSYNC = 51  # macOS


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called, on a system that has F_FULLFSYNC."""
    calls: list[str] = []
    monkeypatch.setattr(durable, "_FULL_FLUSH", _F_FULLFSYNC)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))

    def fcntl(descriptor: int, command: int) -> int:
        assert command == _F_FULLFSYNC
        calls.append("full")
        return 0

    monkeypatch.setattr(durable.fcntl, "fcntl", fcntl)
    return calls


def test_a_full_flush_is_asked_for_where_there_is_one(tmp_path: Path, flushed: list[str]) -> None:
    with open(tmp_path / "file", "wb") as file:
        durable.flush_file(file.fileno())
    durable.flush_folder(tmp_path)
    assert flushed == ["full", "full"]


def test_a_file_system_without_it_is_flushed_as_far_as_it_can_be(
    tmp_path: Path, flushed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fcntl(descriptor: int, command: int) -> int:
        raise OSError("not supported")

    monkeypatch.setattr(durable.fcntl, "fcntl", fcntl)
    with open(tmp_path / "file", "wb") as file:
        durable.flush_file(file.fileno())
    assert flushed == ["fsync"]


def test_nothing_flushes_by_itself() -> None:
    found = []
    for package in ("device_sdk", "aggregator"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in ("fsync", "fdatasync"):
                    found.append(path.relative_to(ROOT).as_posix())
    assert found == ["device_sdk/system/files.py"]


def test_a_device_s_database_flushes_to_the_medium(tmp_path: Path) -> None:
    database = HomeDatabase(tmp_path / "device.sqlite")
    for pragma in ("fullfsync", "checkpoint_fullfsync"):
        assert database.row(f"PRAGMA {pragma}") == (1,)
    database.close()
