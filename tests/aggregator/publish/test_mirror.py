"""Chunks in a folder and in a bucket, and what fails there."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from aggregator.errors import AggregatorError
from aggregator.publish.mirror import ChunkMirror, is_chunk
from device_sdk.wire.codec.message import MessageType, prefix
from tests.fakes.small_folder import SmallFolder
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

CHUNKS = [prefix(MessageType.CHUNK) + bytes([number]) * 1000 for number in range(4)]


def name(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()


def settle(mirror: ChunkMirror) -> None:
    wait_until(lambda: not mirror.behind and not mirror._sweeps)


def test_a_chunk_stands_under_its_hash_until_no_topic_retains_it(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    mirror = ChunkMirror(str(folder), time.monotonic)
    mirror.put("t/0", CHUNKS[0])
    mirror.put("t/1", CHUNKS[1])
    mirror.put("t/2", CHUNKS[1])  # two topics of one content
    settle(mirror)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == {
        name(chunk): chunk for chunk in CHUNKS[:2]
    }
    mirror.put("t/0", CHUNKS[2])
    mirror.drop(["t/1"])
    mirror.sweep()
    wait_until(lambda: not (folder / name(CHUNKS[0])).exists())
    assert {each.name for each in folder.iterdir()} == {name(CHUNKS[1]), name(CHUNKS[2])}
    mirror.stop()


def test_another_life_writes_nothing_twice_and_removes_what_is_out_of_date(tmp_path: Path) -> None:
    first = ChunkMirror(str(tmp_path), time.monotonic)
    for number, chunk in enumerate(CHUNKS[:3]):
        first.put(f"t/{number}", chunk)
    settle(first)
    first.stop()
    (tmp_path / "index.html").write_text("somebody else's")
    kept = tmp_path / name(CHUNKS[0])
    written_ns = kept.stat().st_mtime_ns
    second = ChunkMirror(str(tmp_path), time.monotonic)
    second.put("t/0", CHUNKS[0])
    second.put("t/3", CHUNKS[3])
    second.sweep()
    settle(second)
    wait_until(lambda: not (tmp_path / name(CHUNKS[1])).exists())
    expected = {name(CHUNKS[0]), name(CHUNKS[3]), "index.html"}
    wait_until(lambda: {each.name for each in tmp_path.iterdir()} == expected)
    assert kept.stat().st_mtime_ns == written_ns
    second.stop()


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_what_an_earlier_life_left_half_written_is_written_anew(tmp_path: Path, place: str) -> None:
    url = str(tmp_path) if place == "folder" else f"memory://{tmp_path.name}"
    files, folder = fsspec.core.url_to_fs(url)
    whole, cut, empty, other = CHUNKS
    left = {name(whole): whole, name(cut): cut[:-1], name(empty): b"", "index.html": b"theirs"}
    if place == "folder":  # of a bucket, the size has to do
        left |= {name(other): other[:-1] + b"?", f"{name(other)}.part": b"half"}
    for each, content in left.items():
        files.pipe_file(f"{folder}/{each}", content)
    written_at = files.modified(f"{folder}/{name(whole)}")
    mirror = ChunkMirror(url, time.monotonic)
    for number, chunk in enumerate(CHUNKS):
        mirror.put(f"t/{number}", chunk)
    mirror.sweep()
    settle(mirror)
    found = {path.rsplit("/", 1)[-1]: files.cat_file(path) for path in files.ls(folder, False)}
    assert found == {"index.html": b"theirs"} | {name(chunk): chunk for chunk in CHUNKS}
    assert files.modified(f"{folder}/{name(whole)}") == written_at
    mirror.stop()


def test_a_full_folder_is_written_to_again_once_there_is_room(
    small_folder: SmallFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is out of date is what fills it: removing that is how it heals by itself."""
    monkeypatch.setattr("aggregator.publish.mirror._REST_SECONDS", 0.05)
    caplog.set_level("INFO")
    folder = small_folder.path
    old, new, newest = (prefix(MessageType.CHUNK) + os.urandom(60_000) for _ in range(3))
    mirror = ChunkMirror(str(folder), time.monotonic)
    mirror.put("t/0", old)
    mirror.sweep()
    settle(mirror)
    small_folder.fill()
    mirror.put("t/1", new)
    wait_until(lambda: bool(mirror.problem))
    assert "No space left" in mirror.problem and not mirror.behind
    (said,) = [each.message for each in caplog.records if "cannot be written" in each.message]
    assert str(folder) in said and "cluster.chunk_store" in said
    assert {each.name for each in folder.iterdir()} == {"filler", name(old)}, "no half a chunk"
    mirror.put("t/2", newest)
    mirror.drop(["t/0", "t/1"])  # the broker has it no more
    mirror.sweep()
    wait_until(lambda: not mirror.problem and (folder / name(newest)).exists())
    settle(mirror)
    assert (folder / name(newest)).read_bytes() == newest
    assert {each.name for each in folder.iterdir()} == {"filler", name(newest)}
    small_folder.make_room()
    small_folder.set_read_only(True)
    mirror.put("t/3", CHUNKS[0])
    wait_until(lambda: "Read-only" in mirror.problem)
    small_folder.set_read_only(False)
    wait_until(lambda: not mirror.problem and (folder / name(CHUNKS[0])).exists())
    mirror.stop()


def test_what_somebody_else_has_removed_keeps_nothing_else_from_being_removed(
    tmp_path: Path,
) -> None:
    mirror = ChunkMirror(str(tmp_path), time.monotonic)
    topics = [f"t/{number}" for number in range(4)]
    for topic, chunk in zip(topics, CHUNKS, strict=True):
        mirror.put(topic, chunk)
    settle(mirror)
    (tmp_path / name(CHUNKS[0])).unlink()
    (tmp_path / name(CHUNKS[1])).unlink()
    mirror.drop(topics)
    mirror.sweep()
    wait_until(lambda: not mirror._sweeps and (mirror.failures or not any(tmp_path.iterdir())))
    assert (mirror.failures, list(tmp_path.iterdir())) == (0, [])
    mirror.stop()


def test_a_bucket_of_fsspec() -> None:
    files = fsspec.filesystem("memory")
    mirror = ChunkMirror("memory://bucket/fleet", time.monotonic)
    mirror.put("t/0", CHUNKS[0])
    settle(mirror)
    assert files.cat_file(f"/bucket/fleet/{name(CHUNKS[0])}") == CHUNKS[0]
    mirror.stop()
    files.rm("/bucket", recursive=True)


def test_a_place_that_cannot_be_written_to_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "fleet"
    blocked.write_text("a file where the folder should be")
    mirror = ChunkMirror(str(blocked), time.monotonic)
    for number, chunk in enumerate(CHUNKS):
        mirror.put(f"t/{number}", chunk)
    wait_until(lambda: bool(mirror.problem))
    assert not mirror.behind
    assert [each.message for each in caplog.records if "cannot be written" in each.message]
    blocked.unlink()
    wait_until(lambda: not mirror.problem and len(list(blocked.glob("*"))) == len(CHUNKS))
    mirror.stop()


def test_a_place_that_hangs_is_told_of_and_what_waits_for_it_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("aggregator.publish.mirror._MOST_BYTES", 2000)
    now, hung, goes_on = [0.0], threading.Event(), threading.Event()
    mirror = ChunkMirror(str(tmp_path), lambda: now[0])
    write = mirror._files.write

    def hang(name: str, message: bytes) -> None:
        hung.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        write(name, message)

    monkeypatch.setattr(mirror._files, "write", hang)
    mirror.put("t/0", CHUNKS[0])
    mirror.put("t/1", CHUNKS[1])
    assert hung.wait(PATIENCE_SECONDS)
    mirror.watch()
    assert mirror.behind and not mirror.problem and not caplog.messages
    now[0] = 31.0
    assert not mirror.behind and "hangs" in mirror.problem
    mirror.watch()
    mirror.watch()
    (said,) = caplog.messages
    assert str(tmp_path) in said and "cluster.chunk_store" in said and "hangs" in said
    assert not mirror.has_room
    mirror.drop(["t/0", "t/1"])  # the oldest are out of date
    assert mirror.has_room
    mirror.put("t/2", CHUNKS[2])
    mirror.sweep()
    goes_on.set()
    wait_until(lambda: not mirror.problem)
    assert {each.name for each in tmp_path.iterdir()} == {name(CHUNKS[2])}
    wait_until(lambda: "written to" in caplog.messages[-1] and "again" in caplog.messages[-1])
    mirror.stop()


def test_a_bucket_is_reached_by_the_thread_that_writes() -> None:
    """Some connect to their server as they are made, and it may not answer."""
    makers: list[threading.Thread] = []

    class Connects(MemoryFileSystem):  # type: ignore[misc]
        protocol = "connects"
        cachable = False

        def __init__(self) -> None:
            super().__init__()
            makers.append(threading.current_thread())

    fsspec.register_implementation("connects", Connects, clobber=True)
    mirror = ChunkMirror("connects://bucket", time.monotonic)
    mirror.put("t/0", CHUNKS[0])
    settle(mirror)
    assert makers and threading.main_thread() not in makers and not mirror.problem
    mirror.stop()


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_what_was_removed_or_damaged_meanwhile_is_written_anew_when_it_is_shown_anew(
    tmp_path: Path, place: str
) -> None:
    url = str(tmp_path) if place == "folder" else f"memory://{tmp_path.name}"
    files, folder = fsspec.core.url_to_fs(url)
    whole, removed, cut, _ = CHUNKS
    mirror = ChunkMirror(url, time.monotonic)
    for _life in range(2):
        for number, chunk in enumerate((whole, removed, cut)):
            mirror.put(f"t/{number}", chunk)
        mirror.sweep()
        settle(mirror)
        found = {path.rsplit("/", 1)[-1]: files.cat_file(path) for path in files.ls(folder, False)}
        assert found == {name(chunk): chunk for chunk in (whole, removed, cut)}
        files.rm_file(f"{folder}/{name(removed)}")
        files.pipe_file(f"{folder}/{name(cut)}", b"x")
    mirror.stop()


def test_what_a_bucket_says_is_told_as_one_printable_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = ChunkMirror(str(tmp_path), time.monotonic)

    def refuse(name: str, message: bytes) -> None:
        raise OSError("\x1b[2Jno\nroom" + "!" * 9999)

    monkeypatch.setattr(mirror._files, "write", refuse)
    mirror.put("t/0", CHUNKS[0])
    wait_until(lambda: bool(mirror.problem))
    assert mirror.problem.isprintable() and len(mirror.problem) < 400
    mirror.stop()


def test_a_place_that_fsspec_does_not_know() -> None:
    with pytest.raises(AggregatorError, match=r"cluster\.chunk_store is 'nowhere://x'"):
        ChunkMirror("nowhere://x", time.monotonic)


def test_a_folder_needs_no_fsspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    for place in (str(tmp_path), f"file://{tmp_path}"):
        mirror = ChunkMirror(place, time.monotonic)
        mirror.put("t/0", CHUNKS[0])
        wait_until(lambda: (tmp_path / name(CHUNKS[0])).exists())
        mirror.stop()
        (tmp_path / name(CHUNKS[0])).unlink()
    with pytest.raises(AggregatorError, match=r"pip install 'tessera-edge\[aggregator,cluster\]'"):
        ChunkMirror("s3://bucket/fleet", time.monotonic)


def test_a_folder_that_cannot_be_made_is_told_of_before_there_is_a_chunk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mirror = ChunkMirror("/proc/nope", time.monotonic)
    wait_until(lambda: bool(mirror.problem))
    assert "chunks cannot be written to /proc/nope (cluster.chunk_store)" in caplog.text
    mirror.stop()


def test_only_chunks_are_named_by_their_hash() -> None:
    assert is_chunk(CHUNKS[0])
    assert not is_chunk(prefix(MessageType.MANIFEST) + b"x" * 100)
    assert not is_chunk(b"")
