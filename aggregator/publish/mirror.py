"""Chunks in a folder or bucket that a web server shows, by their hash: none can be faked."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from aggregator.errors import AggregatorError
from aggregator.events import LogEvent
from device_sdk.system.printable import printable
from device_sdk.wire.codec.message import MessageType

_NAME, _PART = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{64}\.part")
_FILE = "file://"
_CHUNK = bytes((MessageType.CHUNK,))
_MOST_BYTES = 64 << 20
_REST_SECONDS, _LONGEST_REST_SECONDS = 5.0, 300.0
_STOP_SECONDS = 2.0
_PATIENCE_SECONDS = 30.0
"""What is published waits no longer for a place that hangs or is slow, and not again until that has
caught up."""
_LATE = f"it hangs, or is too slow: it has not kept up for {_PATIENCE_SECONDS:.0f} seconds"
_MOST_PROBLEM_CHARACTERS = 300
_ADVICE = "devices that ask it in vain ask the broker"


def is_chunk(message: bytes) -> bool:
    """Whether a retained message is a chunk: named by its hash, so that anybody may keep it."""
    return message[1:2] == _CHUNK


class ChunkMirror:
    """Writes chunks to a folder or a bucket, each under the SHA-256 of its message, hexadecimal.

    A thread of its own writes, so that nothing waits for long for a slow bucket, or one that hangs.
    Where a write fails it tries again, with growing waits; meanwhile :attr:`behind` is False, and
    devices that find a chunk missing fetch it from the broker. What is out of date is removed.
    What is handed over anew, by an earlier life or this one, is looked at, and written anew if not
    whole. Files of other names are left alone: the place should be the fleet's own all the same.

    Args:
        place: a folder, or a URL that fsspec knows (``s3://bucket/fleet``).
        clock: monotonic seconds.

    Raises AggregatorError where fsspec, or what it needs for such a URL, is not installed.
    """

    def __init__(self, place: str, clock: Callable[[], float]) -> None:
        self._files: _Folder | _Bucket
        if "://" in place and not place.startswith(_FILE):
            self._files = _Bucket(place)
        else:
            self._files = _Folder(Path(place.removeprefix(_FILE)))
        self._clock = clock
        self._busy_since_seconds: float | None = clock()
        self._place = place
        self._names: dict[str, str] = {}  # by topic
        self._found: dict[str, int | None] = {}  # when the place was listed, with their sizes
        self._written: set[str] = set()
        self._todo: dict[str, bytes] = {}  # by name; the oldest first
        self._bytes = 0
        self._changed = threading.Condition()
        self._listed = self._sweeps = self._stopping = self._told = False
        self._error = ""
        self.failures = 0
        self._thread = threading.Thread(target=self._run, name="tessera-mirror", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why the last write failed, or that none comes to its end; empty where all is well."""
        since = self._busy_since_seconds
        late = since is not None and self._clock() >= since + _PATIENCE_SECONDS
        return self._error or (_LATE if late else "")

    @property
    def has_room(self) -> bool:
        """Whether to hand over more now."""
        return self._bytes < _MOST_BYTES

    @property
    def behind(self) -> bool:
        """Whether chunks wait to be written, and there is hope: what names them should wait."""
        return bool(self._todo) and not self.problem

    def put(self, topic: str, message: bytes) -> None:
        """Keep the chunk that a topic retains."""
        name = hashlib.sha256(message).hexdigest()
        with self._changed:
            self._names[topic] = name
            if name in self._written:
                # Shown anew: what lies there may have been damaged or removed meanwhile.
                self._written.discard(name)
                self._listed = False
            if name not in self._todo:
                self._todo[name] = message
                self._bytes += len(message)
            self._wake()

    def drop(self, topics: Iterable[str]) -> None:
        """What these topics retained is out of date, and goes with the next :meth:`sweep`."""
        with self._changed:
            for topic in topics:
                self._names.pop(topic, None)
            for name in self._todo.keys() - self._names.values():
                self._done(name)  # nobody asks for it any more

    def sweep(self) -> None:
        """Remove what no topic retains, once all that waits is written; an earlier life's too."""
        with self._changed:
            self._sweeps = True
            self._wake()

    def watch(self) -> None:
        """Log once that something is wrong, and once that it is over; to be called often."""
        with self._changed:
            problem, told = self.problem, self._told
            self._told = bool(problem)
        if problem and not told:
            LogEvent.CHUNKS_UNWRITTEN.log(place=self._place, problem=problem, advice=_ADVICE)
        elif told and not problem:
            LogEvent.CHUNKS_WRITTEN.log(place=self._place)

    def stop(self) -> None:
        """End; what is not written is found missing, and fetched from the broker."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(_STOP_SECONDS)

    def _wake(self) -> None:
        if self._busy_since_seconds is None:
            self._busy_since_seconds = self._clock()
        self._changed.notify()

    def _has_work(self) -> bool:
        # The place is looked at before there is anything to write: who named it is told at once.
        return not self._listed or bool(self._todo) or self._sweeps or self._stopping

    def _run(self) -> None:
        rest_seconds = _REST_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._stopping:
                    return
                name, message = next(iter(self._todo.items()), ("", b""))
            try:
                if not self._listed:
                    self._found = self._files.begin()
                    self._listed = True
                if self._sweeps and (self._error or not name):
                    self._remove_stale()  # first where there was no room: perhaps this makes some
                if name and not self._is_whole(name, message):
                    self._files.write(name, message)
            except Exception as error:  # whatever a bucket's library raises
                self.failures += 1
                said = f"{type(error).__name__}: {error}"
                self._error = printable(said, _MOST_PROBLEM_CHARACTERS)
                self.watch()
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, rest_seconds)
                rest_seconds = min(2 * rest_seconds, _LONGEST_REST_SECONDS)
                continue
            with self._changed:
                rest_seconds, self._error = _REST_SECONDS, ""
                if name:
                    self._written.add(name)
                    self._done(name)
                if not self._has_work():
                    self._busy_since_seconds = None
            self.watch()

    def _done(self, name: str) -> None:
        self._bytes -= len(self._todo.pop(name, b""))

    def _is_whole(self, name: str, message: bytes) -> bool:
        """Whether it lies there already."""
        if self._found.get(name) != len(message):
            return False
        with suppress(FileNotFoundError):  # somebody else has removed it
            return self._files.holds(name, message)
        return False

    def _remove_stale(self) -> None:
        with self._changed:
            self._sweeps = False
            stale = self._written.union(self._found) - set(self._names.values())
        for name in stale:
            with suppress(FileNotFoundError):  # somebody else has removed it
                self._files.remove(name)
            self._written.discard(name)
            self._found.pop(name, None)


class _Folder:
    """Files are whole or not there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> dict[str, int | None]:
        """Make it where there is none; the sizes of the chunks that lie in it."""
        self._path.mkdir(parents=True, exist_ok=True)
        found: dict[str, int | None] = {}
        for each in self._path.iterdir():
            if _NAME.fullmatch(each.name):
                found[each.name] = each.stat().st_size
            elif _PART.fullmatch(each.name):
                with suppress(OSError):
                    each.unlink()
        return found

    def holds(self, name: str, message: bytes) -> bool:
        """Whether this is what lies there."""
        return (self._path / name).read_bytes() == message

    def write(self, name: str, message: bytes) -> None:
        part = self._path / f"{name}.part"
        try:
            part.write_bytes(message)
            part.replace(self._path / name)
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise

    def remove(self, name: str) -> None:
        (self._path / name).unlink()


class _Bucket:
    """As a folder, by fsspec. A file is put in its place when it is whole, and not read again."""

    def __init__(self, url: str) -> None:
        self._url, scheme = url, url.partition("://")[0]
        try:
            import fsspec  # type: ignore[import-untyped]

            for each in scheme.split("::"):
                fsspec.get_filesystem_class(each)
        except ModuleNotFoundError as error:
            raise AggregatorError(
                f"cluster.chunk_store is {url!r}: {scheme}:// is written to by fsspec ({error}): "
                "pip install 'tessera-edge[aggregator,cluster]'"
            ) from None
        except (ImportError, ValueError) as error:
            raise AggregatorError(
                f"cluster.chunk_store is {url!r}, which fsspec does not know how to write to: "
                f"{error}"
            ) from None

    def begin(self) -> dict[str, int | None]:
        import fsspec

        # Not before: some connect to their server as they are made.
        self._files, self._folder = fsspec.core.url_to_fs(self._url)
        self._files.invalidate_cache()
        self._files.makedirs(self._folder, exist_ok=True)
        found: dict[str, int | None] = {}
        for each in self._files.ls(self._folder, detail=True):
            name = str(each["name"]).rsplit("/", 1)[-1]
            if _NAME.fullmatch(name):
                found[name] = each.get("size")
        return found

    def holds(self, name: str, message: bytes) -> bool:
        return True

    def write(self, name: str, message: bytes) -> None:
        self._files.pipe_file(f"{self._folder}/{name}", message)

    def remove(self, name: str) -> None:
        self._files.rm_file(f"{self._folder}/{name}")
