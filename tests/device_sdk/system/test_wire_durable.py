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


def test_a_file_that_is_linked_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    far, link = tmp_path / "far" / "real", tmp_path / "link"
    link.symlink_to(far)
    for data in (b"first", b"second"):
        durable.write_atomically(link, data)
        assert link.is_symlink() and far.read_bytes() == data
    assert sorted(os.listdir(tmp_path)) == ["far", "link"]
    assert os.listdir(tmp_path / "far") == ["real"]
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(OSError, match="symbolic links"):
        durable.write_atomically(circle, b"")


@pytest.mark.parametrize("path", ["folder", ".", "/", "pipe", "link", "file/below"])
def test_what_is_no_file_is_not_replaced_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"before")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")

    def seen() -> dict[str, int]:
        return {each: os.lstat(each).st_mode for each in os.listdir()}

    before = seen()
    with pytest.raises(OSError, match=r"is a folder|no regular file|Not a directory"):
        durable.write_atomically(Path(path), b"after")
    assert seen() == before
