"""The task file: one TOML file that says what a fleet learns, and how."""

from __future__ import annotations

import importlib.util
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregator.errors import TaskError
from aggregator.methods.binding import Binding, read_binding
from aggregator.tables import TomlTable
from device_sdk.link.broker_url import BrokerUrl, TlsFiles, parse_broker_url
from device_sdk.methods.registry import METHODS, MethodError, method_names
from device_sdk.wire.codec.names import require_name
from device_sdk.wire.publish.task_messages import BROADCAST_CODECS, UPDATE_CODECS
from device_sdk.wire.publish.topics import Topics

# How a task's rounds open and close.


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """Raises TaskError, naming the key, through :meth:`read`.

    Attributes:
        share: expected share of the devices that a round selects, 0 < share <= 1.
        quorum: updates that make a version; fewer are carried into the next round.
        wait_for_devices: no round opens before so many devices are enrolled.
        deadline_seconds: a round collects no longer than this.
        adaptive_deadline: end rounds earlier, after the p90 of the last rounds' arrival times
            multiplied by ``deadline_margin``, but not before ``least_deadline_seconds``.
        resume_grace_seconds: after a restart a round stays open at least this long.
        pause_seconds: between the end of a round and the next one.
        most_rounds: no round beyond this number; 0 for no end.
        train_seconds: what devices are told that their local training should fit into.
    """

    share: float
    quorum: int
    wait_for_devices: int
    deadline_seconds: float
    adaptive_deadline: bool
    deadline_margin: float
    least_deadline_seconds: float
    resume_grace_seconds: float
    pause_seconds: float
    most_rounds: int
    train_seconds: float

    @classmethod
    def read(cls, table: TomlTable) -> RoundSettings:
        """The table ``[round]``."""
        quorum = table.integer("quorum", 1, least=1)
        deadline_seconds = table.number("deadline_seconds", 300.0, above=0.0, most=30 * 86_400)
        settings = cls(
            share=table.number("share", 1.0, above=0.0, most=1.0),
            quorum=quorum,
            wait_for_devices=table.integer("wait_for_devices", quorum, least=1),
            deadline_seconds=deadline_seconds,
            adaptive_deadline=table.boolean("adaptive_deadline", False),
            deadline_margin=table.number("deadline_margin", 1.5, least=1.0, most=100.0),
            least_deadline_seconds=table.number(
                "least_deadline_seconds", min(5.0, deadline_seconds), above=0.0
            ),
            resume_grace_seconds=table.number(
                "resume_grace_seconds", min(30.0, deadline_seconds), least=0.0
            ),
            pause_seconds=table.number("pause_seconds", 0.0, least=0.0),
            most_rounds=table.integer("most_rounds", 0, least=0),
            train_seconds=table.number("train_seconds", deadline_seconds / 2, above=0.0),
        )
        if settings.least_deadline_seconds > deadline_seconds:
            raise table.error("least_deadline_seconds", "lies above round.deadline_seconds")
        table.finish()
        return settings


SHIPPED_PREFIX = "shipped:"
_HIGHEST_PORT = 65_535
_DAY_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Where the broker is. ``password_file`` keeps the password out of the task file."""

    url: BrokerUrl
    prefix: str
    tls: TlsFiles | None


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How the log is written: ``group_updates`` a commit at most, a checkpoint now and then."""

    group_updates: int
    checkpoint_updates: int
    verdict_days: int


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """The shares of the time that go into sessions' opens and into enrolments, at most."""

    opens_share: float
    enrolments_share: float


@dataclass(frozen=True, slots=True)
class Task:
    """A whole task file."""

    name: str
    cohort: str
    artifacts: tuple[Path, ...]
    """The artifacts' folders, smallest first; none when devices are told of none."""
    companions: tuple[Path, ...]
    """Artifacts that go with them, one for each or none at all (attention's meta-networks)."""
    catalogue: Path | None
    """None for methods on local arrays."""
    broadcast_codec: str
    update_codec: str
    metrics_port: int
    """On the loopback interface; 0 for none."""
    descriptor_seconds: int
    """What a renewed descriptor holds for."""
    broker: BrokerSettings
    round: RoundSettings
    store: StoreSettings
    admission: AdmissionSettings
    binding: Binding[Any]


def read_task(path: Path) -> Task:
    """Read and check a task file; paths in it are relative to its folder.

    Raises TaskError, which names the file and the key.
    """
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} is not TOML: {error}") from None
    try:
        return _task(TomlTable(values), path.parent)
    except TaskError as error:
        raise TaskError(f"{path}: {error}") from None


def _task(root: TomlTable, folder: Path) -> Task:
    table = root.table("task")
    method = table.choice("method", method_names(METHODS), "scatter")
    metrics, keys = root.table("metrics"), root.table("keys")
    name, cohort = _name(table, "name", "default"), _name(table, "cohort", "all")
    artifacts, companions = _artifacts(table, folder)
    try:
        binding = read_binding(method, root.table(method))
    except MethodError as error:
        raise table.error("method", f"cannot be used: {error}") from None
    _require_artifacts(table, artifacts, companions, binding)
    task = Task(
        name=name,
        cohort=cohort,
        artifacts=artifacts,
        companions=companions,
        catalogue=_catalogue(table, folder, binding),
        broadcast_codec=table.choice("broadcast_codec", sorted(BROADCAST_CODECS), "float16"),
        update_codec=table.choice("update_codec", sorted(UPDATE_CODECS), "int8"),
        metrics_port=metrics.integer("port", 0, least=0, most=_HIGHEST_PORT),
        descriptor_seconds=keys.integer("descriptor_days", 30, least=1, most=365) * _DAY_SECONDS,
        broker=_broker(root.table("broker"), folder),
        round=RoundSettings.read(root.table("round")),
        store=_store(root.table("store")),
        admission=_admission(root.table("admission")),
        binding=binding,
    )
    table.finish()
    metrics.finish()
    keys.finish()
    root.finish()
    return task


def _name(table: TomlTable, key: str, default: str) -> str:
    value = table.text(key, default)
    try:
        require_name(key, value)
    except ValueError as error:
        raise table.error(key, f"is no name: {error}") from None
    return value


def _catalogue(table: TomlTable, folder: Path, binding: Binding[Any]) -> Path | None:
    if binding.needs_catalogue:
        return _existing(table, "catalogue", table.text("catalogue"), folder)
    if table.optional_text("catalogue") is not None:
        raise table.error("catalogue", f"is given, but {binding.method_name} has no items")
    return None


def _artifacts(table: TomlTable, folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    single, several = table.optional_text("artifact"), table.texts("artifacts")
    if single is not None and several:
        raise table.error("artifact", "and task.artifacts are given: keep one of them")
    named = [single] if single is not None else several
    key = "artifact" if single is not None else "artifacts"
    return (
        tuple(_artifact(table, key, value, folder) for value in named),
        tuple(_artifact(table, "companions", each, folder) for each in table.texts("companions")),
    )


def _require_artifacts(
    table: TomlTable,
    artifacts: tuple[Path, ...],
    companions: tuple[Path, ...],
    binding: Binding[Any],
) -> None:
    allowed = binding.artifacts
    if len(artifacts) not in allowed:
        least, most = allowed[0], allowed[-1]
        expected = f"{least}" if least == most else f"{least} to {most}"
        raise table.error(
            "artifacts",
            f"lists {len(artifacts)} artifacts; {binding.method_name} takes {expected}",
        )
    if companions and len(companions) != len(artifacts):
        raise table.error(
            "companions", f"lists {len(companions)}; expected one for each artifact, or none"
        )


def _artifact(table: TomlTable, key: str, value: str, folder: Path) -> Path:
    if not value.startswith(SHIPPED_PREFIX):
        return _existing(table, key, value, folder)
    # Found without importing device_sdk, which the server may lack the dependencies for.
    spec = importlib.util.find_spec("device_sdk")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(place) / "artifacts" / value.removeprefix(SHIPPED_PREFIX)
        if path.is_dir():
            return path
    raise table.error(key, f"is {value!r}, which is not shipped; shipped is 'shipped:mf'")


def _existing(table: TomlTable, key: str, value: str, folder: Path) -> Path:
    path = folder / value
    if not path.exists():
        raise table.error(key, f"names {path}, which does not exist")
    return path


def _broker(table: TomlTable, folder: Path) -> BrokerSettings:
    try:
        url = parse_broker_url(table.text("url", "mqtt://127.0.0.1:1883"))
    except ValueError as error:
        raise table.error("url", f"is not usable: {error}") from None
    prefix = table.text("prefix", "tessera")
    try:
        Topics(prefix)
    except ValueError as error:
        raise table.error("prefix", f"is not usable: {error}") from None
    user = table.optional_text("user")
    password_file = table.optional_text("password_file")
    if user is not None:
        url = BrokerUrl(url.host, url.port, url.tls, user, url.password)
    if password_file is not None:
        if url.user is None:
            raise table.error("password_file", "is given without broker.user")
        password = _existing(table, "password_file", password_file, folder).read_text().strip()
        url = BrokerUrl(url.host, url.port, url.tls, url.user, password)
    files = {
        key: _existing(table, key, value, folder)
        for key in ("ca_file", "certificate_file", "key_file")
        if (value := table.optional_text(key)) is not None
    }
    if files and not url.tls:
        raise table.error(next(iter(files)), "is given, but broker.url starts with mqtt://")
    if "key_file" in files and "certificate_file" not in files:
        raise table.error("key_file", "is given without broker.certificate_file")
    table.finish()
    tls = None
    if files:
        tls = TlsFiles(files.get("ca_file"), files.get("certificate_file"), files.get("key_file"))
    return BrokerSettings(url, prefix, tls)


def _store(table: TomlTable) -> StoreSettings:
    settings = StoreSettings(
        group_updates=table.integer("group_updates", 128, least=1, most=65_536),
        checkpoint_updates=table.integer("checkpoint_updates", 20_000, least=1),
        verdict_days=table.integer("verdict_days", 30, least=1, most=3650),
    )
    table.finish()
    return settings


def _admission(table: TomlTable) -> AdmissionSettings:
    settings = AdmissionSettings(
        opens_share=table.number("opens_share", 0.35, above=0.0, most=1.0),
        enrolments_share=table.number("enrolments_share", 0.15, above=0.0, most=1.0),
    )
    table.finish()
    return settings
