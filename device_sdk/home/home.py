"""The home folder: lock, identity, database and artifacts."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.load import read_checked, read_manifest
from device_sdk.errors import HomeBroken, HomeError, HomeLocked, NotEnrolled, UnknownUser
from device_sdk.home.database import HomeDatabase
from device_sdk.home.interaction_store import InteractionStore
from device_sdk.home.membership import MembershipStore, RequestCounter
from device_sdk.home.model_store import AttachmentStore, ModelStore
from device_sdk.home.round_store import RoundStore
from device_sdk.home.task_store import KnownTasks, SpentStore, TrialStore
from device_sdk.system.files import write_atomically
from device_sdk.system.lock import FileLock
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.keys import KeyKind, generate, read_key, signing_key, write_key

_DATABASE = "device.sqlite"
_IDENTITY = "identity.key"
_LOCK = "lock"
_ARTIFACTS = "artifacts"
_OF_CONTENT = re.compile(r"\.?([0-9a-f]{64})(\.|$)")
"""An artifact's folder, a file of shared values, or what a crash left half written of one."""

_Signature = tuple[tuple[str, int, int, int], ...]
_log = logging.getLogger("device_sdk")


class Home:
    """An open home folder.

    Args:
        folder: made, mode 0700, with ``create``.
        create: for enrolment; else a missing folder raises :class:`NotEnrolled`.
        read_only: no lock is taken and nothing is written, so a running device is not disturbed.
        beside: no lock is taken, and single rows are written that a running device looks at.

    Raises :class:`HomeLocked`, :class:`HomeBroken`, :class:`NotEnrolled`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        create: bool = False,
        read_only: bool = False,
        beside: bool = False,
    ) -> None:
        self.folder = folder
        self.read_only = read_only
        if create:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise HomeBroken(f"the home folder {folder} cannot be made: {error}") from error
        elif not (folder / _DATABASE).is_file():
            raise NotEnrolled(
                f"{folder} is no device's home: enrol first (`tessera-device join URL --home "
                f"{folder}`, or Device.enrol)"
            )
        self._lock: FileLock | None = None
        try:
            self._lock = None if read_only or beside else _hold(folder)
            self.database = HomeDatabase(folder / _DATABASE, read_only=read_only)
        except (OSError, HomeError) as error:
            self._release()
            if isinstance(error, HomeError):
                raise
            raise HomeBroken(f"the home folder {folder} cannot be used: {error}") from error
        self.membership = MembershipStore(self.database)
        self.requests = RequestCounter(self.database)
        self.interactions = InteractionStore(self.database)
        self.rounds = RoundStore(self.database)
        self.models = ModelStore(self.database)
        self.attachments = AttachmentStore(self.database)
        self.tasks = KnownTasks(self.database)
        self.spent = SpentStore(self.database)
        self.trials = TrialStore(self.database)
        self._whole: dict[bytes, _Signature] = {}

    def identity(self, *, create: bool = False) -> Ed25519PrivateKey:
        """The device's key. One that is made here is on the disk when this returns.

        Raises :class:`HomeBroken` where it is missing, damaged or readable by others.
        """
        path = self.folder / _IDENTITY
        if create and not path.exists():
            write_key(path, KeyKind.ED25519, generate(KeyKind.ED25519))
        try:
            return signing_key(read_key(path, KeyKind.ED25519))
        except (OSError, WireError) as error:
            if os.name == "posix" and path.is_file() and path.stat().st_mode & 0o077:
                raise HomeBroken(
                    f"{path} can be read by others on this machine: `chmod 600 {path}`, and go on. "
                    "Nothing is lost; if somebody else may have copied it, enrol again with a code "
                    "from `tessera-aggregator invite --replaces ID`"
                ) from error
            raise HomeBroken(
                f"the identity in {path} cannot be used ({error}); without it this device has to "
                "enrol again, with a code from `tessera-aggregator invite --replaces ID`"
            ) from error

    def artifact_folder(self, artifact_id: bytes) -> Path:
        """Where an artifact lies, or would."""
        return self.folder / _ARTIFACTS / artifact_id.hex()

    def has_artifact(self, artifact_id: bytes) -> bool:
        """Whether all of an artifact's bytes are here: those of its id, and no others.

        What lies in their place (half of a copy, a backup's) is removed, and comes again.
        """
        folder = self.artifact_folder(artifact_id)
        if not folder.is_dir():
            return False
        before = _signature(folder)
        if before and self._whole.get(artifact_id) == before:
            return True
        try:
            manifest = read_manifest(folder)
            if manifest.id != artifact_id.hex():
                raise ArtifactError(f"{folder} holds the artifact {manifest.id}")
            for name, entry in manifest.files.items():
                read_checked(folder, name, entry)
        except ArtifactError as error:
            _log.warning("an artifact was changed since it came, and comes again: %s", error)
            self._remove(folder)
            return False
        self._whole[artifact_id] = before
        return True

    def shared_file(self, digest: bytes) -> Path:
        """Where values that artifacts share lie, or would: beside the artifacts' folders."""
        return self.folder / _ARTIFACTS / f"{digest.hex()}.safetensors"

    def has_shared(self, digest: bytes) -> bool:
        """Whether values that artifacts share are here: those of the SHA-256, and no others, which
        are removed, and come again."""
        path = self.shared_file(digest)
        before = _signature(path)
        if before and self._whole.get(digest) == before:
            return True
        try:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").digest() != digest:
                    raise OSError("its SHA-256 is another")
        except FileNotFoundError:
            return False
        except OSError as error:
            _log.warning("%s was changed since it came, and comes again: %s", path, error)
            self._remove(path)
            return False
        self._whole[digest] = before
        return True

    def save_shared(self, digest: bytes, content: bytes) -> None:
        """Store values that artifacts share, which were checked against their SHA-256."""
        path = self.shared_file(digest)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, content)

    def save_artifact(self, artifact_id: bytes, files: Mapping[str, bytes]) -> Path:
        """Store the files of an artifact that were checked against its id."""
        final = self.artifact_folder(artifact_id)
        if self.has_artifact(artifact_id):
            return final
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        for name, data in files.items():
            write_atomically(partial / name, data)
        self._remove(final)
        os.replace(partial, final)  # a crash before this leaves no artifact that looks whole
        return final

    def record_names(self, task: str) -> tuple[str, ...]:
        """Under which names the interactions of a task were recorded; "" is without a name.

        Those without a name are of one task for good: of the first that trains on them
        (:meth:`device_sdk.home.task_store.TaskStore.own`), which is the one the home was enrolled
        with, if that trains on such.
        """
        owner = self.tasks.owner()
        if owner is None:
            membership = self.membership.load()
            owner = task if membership is None else membership.task
            takes = {row.name: row.takes for row in self.tasks.all()}
            if takes.get(owner) == "arrays":
                others = [name for name, what in takes.items() if what == "records"]
                owner = others[0] if len(others) == 1 else ""
        return (task, "") if owner == task else (task,)

    def clean(self) -> None:
        """Forget what only tasks that are no longer served had use for.

        That is contents that come again where they are needed: attachments, measurements, and train
        graphs. Models, learners' states and interactions stay.
        """
        served = [row for row in self.tasks.all() if row.served]
        self.tasks.forget_contents()
        ids = {each for row in served for each in row.artifacts} | self.models.artifacts()
        needed = {each.hex() for each in ids}
        for each in ids:  # of a model whose task is gone nothing else says what it shares
            with contextlib.suppress(ArtifactError):
                needed.add(Path(read_manifest(self.artifact_folder(each)).shared_file).stem)
        for place in (self.folder / _ARTIFACTS).glob("*"):
            content = _OF_CONTENT.match(place.name)
            if content is not None and content[1] not in needed:
                self._remove(place)

    def _remove(self, place: Path) -> None:
        """What lies there is gone, a folder or a file, where the home may be written."""
        if self.read_only:
            return
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the database and release the lock. May be called twice."""
        self.database.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _signature(place: Path) -> _Signature:
    """Of a file, or a folder's files: whoever changes one, or puts another in its place, changes
    this too. Empty where there is none."""
    with contextlib.suppress(OSError):
        files = place.iterdir() if place.is_dir() else [place]
        found = [(each.name, each.stat()) for each in files]
        return tuple(sorted((name, s.st_ino, s.st_size, s.st_ctime_ns) for name, s in found))
    return ()


def _hold(folder: Path) -> FileLock:
    """The folder's lock, held. Two processes with one identity would send two updates a round."""
    lock = FileLock(folder / _LOCK)
    if not lock.try_acquire():
        holder = lock.holder()
        lock.close()
        raise HomeLocked(
            f"{folder} is in use by {holder}: stop it first, or give each process a home of its "
            "own (reading status and recommendations needs no lock: read_only=True)"
        )
    lock.sign()
    return lock


# What a local user did, taken out of the home.

_OF_USERS = {"users": 2, "untrained_from": 1}
"""Of a learner that recommends, what has a row for each local user, in their order, and its
dimensions."""


def forget(home: Home, user: str | None, item: str | None) -> int:
    """Delete a user with all interactions and the vector, or interactions with an item, of one user
    or of all; how many interactions. In one transaction, and overwritten on the disk.

    Raises :class:`UnknownUser`.
    """
    with home.database.transaction() as sql:
        where: list[str] = []
        values: list[int | str] = []
        place = None if user is None else home.interactions.place(user)
        if user is not None:
            if place is None:
                some = ", ".join(home.interactions.some_users(5)) or "nobody yet"
                raise UnknownUser(f"nothing was recorded for the local user {user!r}; here: {some}")
            where.append("user = ?")
            values.append(place)
        if item is not None:
            where.append("item = ?")
            values.append(item)
        found = sql.execute(f"DELETE FROM interaction WHERE {' AND '.join(where)}", values).rowcount
        if place is not None and item is None:
            _close_ranks(home, place)
        _lower_untrained(home)
    home.database.erase_deleted()
    return found


def _close_ranks(home: Home, place: int) -> None:
    """Take the user out, and those behind one place up, in the tables and among the vectors."""
    with home.database.transaction() as sql:
        sql.execute("PRAGMA defer_foreign_keys = ON")
        sql.execute("DELETE FROM user WHERE place = ?", (place,))
        for (behind,) in sql.execute(
            "SELECT place FROM user WHERE place > ? ORDER BY place", (place,)
        ).fetchall():
            sql.execute("UPDATE user SET place = ? WHERE place = ?", (behind - 1, behind))
            sql.execute("UPDATE interaction SET user = ? WHERE user = ?", (behind - 1, behind))
        for task in home.models.learner_tasks():
            state = dict(home.models.learner(task) or {})
            for name, dimensions in _OF_USERS.items():
                rows = state.get(name)
                if rows is not None and rows.ndim == dimensions and place < len(rows):
                    state[name] = np.delete(rows, place, axis=0)
                    home.models.change_learner(task, state)


def _lower_untrained(home: Home) -> None:
    """What a user records next was not trained on, though it takes over the number of an item that
    was, and is forgotten."""
    for task in home.models.learner_tasks():
        state = dict(home.models.learner(task) or {})
        numbers = state.get("untrained_from")
        if numbers is not None and numbers.ndim == 1:
            following = home.interactions.next_numbers()[: len(numbers)]
            numbers[: len(following)] = np.minimum(numbers[: len(following)], following)
            home.models.change_learner(task, {**state, "untrained_from": numbers})
