"""What the coordinator tells workers: keys, the life that sessions belong to, and the tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.folder import FleetKeys
from aggregator.store import Store, open_database
from aggregator.task.cluster import Cluster, WorkerSlot
from aggregator.task.file import SharedSettings, Task
from device_sdk.artifact import Artifact, Manifest
from device_sdk.artifact.load import checked_initial
from device_sdk.artifact.manifest import INITIAL_FILE, MANIFEST_FILE
from device_sdk.link.broker_url import BrokerWay
from device_sdk.system.version import __version__
from device_sdk.wire.publish.content import unpack_artifact
from device_sdk.wire.seal.descriptor import read_descriptor, root_of
from device_sdk.wire.seal.keyring import HandshakeKeys, Keyring, handshake_keys
from device_sdk.wire.seal.keys import KeyKind, read_key, signing_key


@dataclass(frozen=True, slots=True)
class Post:
    """What a worker is started with.

    Attributes:
        slot: its place.
        store: a PostgreSQL URL, or the path of a SQLite file on this machine.
        identity: which store it has to be, where a URL names it.
        cluster, settings: the task file's, without what this worker has no use for: the broker is
            that of its cell, and no other's URL is there, nor the store's owner's.
        ways: to that broker; to several, the first one first, while the fleet moves.
        root_fingerprint: the fleet's.
        program: the coordinator's version, which must be the worker's.
    """

    slot: WorkerSlot
    store: Path | str
    identity: str
    cluster: Cluster
    settings: SharedSettings
    ways: tuple[BrokerWay, ...]
    root_fingerprint: bytes
    program: str = __version__

    def open_store(self) -> Store:
        """Raises AggregatorError where the coordinator is another version, and where the store
        cannot be reached."""
        if self.program != __version__:
            raise AggregatorError(
                f"the coordinator is version {self.program}, this worker {__version__}: install "
                "the same on all machines"
            )
        return Store(open_database(self.store, identity=self.identity, by_worker=True))


@dataclass(frozen=True, slots=True)
class KeyMaterial:
    """The private keys of one descriptor that sessions need. They travel in calls, and lie on no
    worker's disk. No other key leaves the coordinator: what devices believe of all that is said to
    the fleet, or to who enrols, no worker can sign."""

    descriptor: bytes
    sessions_seed: bytes
    hpke_seed: bytes
    honoured_until_unix_seconds: int | None

    def __repr__(self) -> str:
        return "KeyMaterial(...)"


@dataclass(frozen=True, slots=True)
class ServedTask:
    """A task as it is served: a round of another generation, or of other settings, is not of it."""

    number: int
    generation: int
    task: Task
    bundles: tuple[tuple[bytes, bytes], ...]
    """Ids of the task's artifacts, and their files as devices get them."""

    def artifacts(self) -> tuple[Artifact, ...]:
        """Without their graphs: nothing is trained here."""
        found = []
        for artifact_id, content in self.bundles:
            files = unpack_artifact(content, artifact_id)
            manifest = Manifest.parse(files[MANIFEST_FILE])
            found.append(Artifact(manifest, {}, checked_initial(manifest, files[INITIAL_FILE])))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Orders:
    """Everything that a worker needs from the coordinator. ``incarnation``: of the life that
    devices are told of. ``absent``: names of tasks that are not served at present."""

    incarnation: bytes
    keys: tuple[KeyMaterial, ...]
    tasks: tuple[ServedTask, ...]
    absent: tuple[str, ...] = ()


def material(home: AggregatorHome, keys: FleetKeys) -> tuple[KeyMaterial, ...]:
    """Of the descriptors that are honoured at present."""
    return tuple(
        KeyMaterial(
            each.descriptor.message,
            each.sessions.private_bytes_raw(),
            read_key(home.hpke_key(each.descriptor.serial), KeyKind.HPKE),
            each.honoured_until_unix_seconds,
        )
        for each in keys.keyring
    )


def keyring_of(keys: Iterable[KeyMaterial]) -> Keyring[HandshakeKeys]:
    """What sessions are opened with."""
    return Keyring(
        handshake_keys(
            read_descriptor(each.descriptor, root_of(each.descriptor)),
            signing_key(each.sessions_seed),
            each.hpke_seed,
            each.honoured_until_unix_seconds,
        )
        for each in keys
    )
