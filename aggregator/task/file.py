"""The task file: one TOML file that says what a fleet learns, and how."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_network
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from aggregator.errors import AggregatorError, TaskError
from aggregator.methods.method import Binding, read_binding
from aggregator.store import TaskStore
from aggregator.store.versions import Ranking
from aggregator.tables import TomlTable
from aggregator.task.cluster import Cluster, read_cluster
from aggregator.task.evaluation import EvaluationSettings, read_evaluation
from aggregator.task.warm_start import WarmStart
from device_sdk.artifact import ArtifactError
from device_sdk.artifact.load import rung_folders
from device_sdk.fields import OneOf, Within, hints_of
from device_sdk.link.broker_url import BrokerWay, TlsFiles, parse_broker_url
from device_sdk.link.proxy import proxy_for
from device_sdk.methods.registry import MethodError
from device_sdk.tables.columns import Columns, catalogue_columns, names_a_catalogue
from device_sdk.tables.text import UNREADABLE, TableError, TextTable, open_table
from device_sdk.wire.codec.message import decode, require_name
from device_sdk.wire.publish.catalogue import Catalogue
from device_sdk.wire.publish.task_messages import (
    BROADCAST_CODECS,
    MOST_LABELS,
    UPDATE_CODECS,
    require_labels,
)
from device_sdk.wire.publish.topics import Topics

# Which devices a task is for: ``[task] only = {site = "north"}``, over the devices' labels.


@dataclass(frozen=True, slots=True)
class Selector:
    """``only``: by the label's name the values that it may have. Empty: every device."""

    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.only)

    def __str__(self) -> str:
        parts = (f"{name} = {' or '.join(values)}" for name, values in sorted(self.only.items()))
        return " and ".join(parts)

    def admits(self, labels: Mapping[str, str]) -> bool:
        """Whether the task is for a device with these labels: each one named fits."""
        return all(labels.get(name) in values for name, values in self.only.items())


def read_selector(table: TomlTable) -> Selector:
    """A table of labels, each with a text or several of which any will do. Raises TaskError."""
    only = {}
    for name in table.names():
        value: Any = table.take(name)
        values = tuple(value) if isinstance(value, list) else (value,)
        if not values:
            raise table.wrong(name, value, "a text, or a list of texts of which any will do")
        for each in values:
            try:
                require_labels({name: each})
            except ValueError as error:
                raise table.error(name, f"cannot be chosen by: {error}") from None
        only[name] = values
    if len(only) > MOST_LABELS:
        raise table.error("", f"names {len(only)} labels; expected at most {MOST_LABELS}")
    return Selector(only)


def served_selector(text: str | None) -> Selector:
    """That of a task file which was read before; of every device where there is none."""
    if text is None:
        return Selector()
    return read_selector(TomlTable(tomllib.loads(text)).table("task").table("only"))


SHIPPED_PREFIX = "shipped:"
_DAY_SECONDS = 86_400
_SHARE = Within(0, 1, above=True)

# The tables of a task file: what each key is called, may be, is when it is left out, and means.
# The template that ``init`` writes is made from them.


@dataclass(frozen=True, slots=True)
class TaskTable:
    """The table ``[task]``.

    Attributes:
        name: devices name it when they join: 1 to 64 of a-z 0-9 . _ -
        cohort: which of the task's fleets this one is, likewise.
        method: how the fleet learns.
        artifact: a folder made by tessera-export, a ladder's (export.submodels), or shipped:mf.
        artifacts: several of them, smallest first.
        companions: artifacts that go with them, one for each or none at all (attention's).
        catalogue: one item a line, append only: id, or id<TAB>title, or a table with such a header.
        folder: what relative paths are relative to (default: this file's folder).
        broadcast_codec: how the model's numbers travel to devices.
        update_codec: how those of updates travel back.
        warm_start: what the first version is made of: a safetensors file, or task:NAME@best.
    """

    name: str = "default"
    cohort: str = "all"
    method: str = "scatter"
    artifact: str | None = None
    artifacts: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    catalogue: str | None = None
    folder: str | None = None
    broadcast_codec: Annotated[str, OneOf(tuple(sorted(BROADCAST_CODECS)))] = "float16"
    update_codec: Annotated[str, OneOf(tuple(sorted(UPDATE_CODECS)))] = "int8"
    warm_start: str | None = None


@dataclass(frozen=True, slots=True)
class BrokerTable:
    """The table ``[broker]``.

    Attributes:
        url: mqtts://host:8883 for TLS, wss://host/mqtt for WebSocket.
        proxy: an HTTP proxy on the way, which knows CONNECT.
        prefix: all topics lie below it.
        user: who the aggregator is to the broker.
        password_file: keeps the password out of this file.
        ca_file: with mqtts:// and an authority of your own.
        certificate_file: with a broker that asks for one.
        key_file: the certificate's.
        client_id_prefix: what client ids begin with, where the broker asks for that.
    """

    url: str = "mqtt://127.0.0.1:1883"
    proxy: str | None = None
    prefix: str = "tessera"
    user: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    client_id_prefix: str = ""


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """The table ``[round]``: how a task's rounds open and close.

    Attributes:
        share: expected share of the devices in each round, at most.
        quorum: updates that make a new version. Fewer are carried into the next round.
        wanted: a round closes at so many counted updates; 0: when those that are likely to come
            have come.
        over_select: with wanted: so many times as many devices are asked.
        late: what becomes of an update whose round is closed. staleness: of an earlier version, it
            counts in the open round for less.
        most_stale: with staleness: of how many versions ago at most.
        wait_for_devices: no round opens before so many are enrolled (default: the quorum).
        deadline_seconds: a round collects no longer than this.
        deadline_margin: a round waits for a device this many times as long as its updates took of
            late.
        least_deadline_seconds: no round closes sooner without everybody (default: no more than the
            deadline).
        resume_grace_seconds: after a restart a round stays open at least this long, for devices to
            open their sessions anew; one that never opened any is waited for as long (default: no
            longer than the deadline).
        pause_seconds: between the end of a round and the next one.
        most_rounds: stop after this many since the task began, or was replaced, those without a
            quorum too; 0: never.
        train_seconds: devices pick a k, or a model, that fits this (default: half the deadline).
        abort_share: no further round opens where so many of the devices that took a round failed
            for a reason that the task is to blame for, or fell silent when it was replaced.
        abort_devices: where at least so many took it; 0: never.
    """

    share: Annotated[float, _SHARE] = 1.0
    quorum: Annotated[int, Within(1, 2**31)] = 1
    wanted: Annotated[int, Within(0, 2**31)] = 0
    over_select: Annotated[float, Within(1, 1000)] = 1.3
    late: Literal["refuse", "staleness"] = "refuse"
    most_stale: Annotated[int, Within(1, 1000)] = 100
    wait_for_devices: Annotated[int, Within(1, 2**31)] = 1
    deadline_seconds: Annotated[float, Within(0, 30 * _DAY_SECONDS, above=True)] = 300.0
    deadline_margin: Annotated[float, Within(1, 100)] = 2.0
    least_deadline_seconds: Annotated[float, Within(0, 1e12, above=True)] = 5.0
    resume_grace_seconds: Annotated[float, Within(0, 1e12)] = 30.0
    pause_seconds: Annotated[float, Within(0, 1e12)] = 0.0
    most_rounds: Annotated[int, Within(0, 2**31)] = 0
    train_seconds: Annotated[float, Within(0, 1e12, above=True)] = 150.0
    abort_share: Annotated[float, _SHARE] = 0.5
    abort_devices: Annotated[int, Within(0, 2**31)] = 4

    @classmethod
    def read(cls, table: TomlTable) -> RoundSettings:
        """Read the table, in which some defaults follow from others. Raises TaskError."""
        hints, usual = hints_of(cls), cls()
        quorum = table.declared("quorum", hints["quorum"], usual.quorum)
        deadline = table.declared(
            "deadline_seconds", hints["deadline_seconds"], usual.deadline_seconds
        )
        usual = replace(
            usual,
            wait_for_devices=quorum,
            least_deadline_seconds=min(usual.least_deadline_seconds, deadline),
            resume_grace_seconds=min(usual.resume_grace_seconds, deadline),
            train_seconds=deadline / 2,
        )
        settings = table.read(cls, usual)
        if settings.least_deadline_seconds > deadline:
            raise table.error("least_deadline_seconds", "lies above round.deadline_seconds")
        if 0 < settings.wanted < quorum:
            raise table.error("wanted", f"is less than round.quorum, {quorum}: it makes no version")
        return settings

    @property
    def most_age(self) -> int:
        """How many versions ago an update of a closed round may be trained on; -1: none counts."""
        return self.most_stale if self.late == "staleness" else -1

    @property
    def useful_seconds(self) -> float:
        """How long after a round's opening an update of it may count, if rounds take their time."""
        return self.deadline_seconds * max(1, 1 + self.most_age)


def served_round(text: str) -> RoundSettings:
    """Those of a task file which was read before."""
    return RoundSettings.read(TomlTable(tomllib.loads(text)).table("round"))


def served_evaluation(text: str) -> EvaluationSettings | None:
    """Those of a task file which was read before; None without the table."""
    tables = tomllib.loads(text)
    if "evaluation" not in tables:
        return None
    return TomlTable(tables).table("evaluation").read(EvaluationSettings)


def served_cohort(text: str) -> str:
    """That of a task file which was read before."""
    return str(tomllib.loads(text).get("task", {}).get("cohort", TaskTable().cohort))


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The table ``[store]``: how the log is written.

    Attributes:
        group_updates: updates a commit at most.
        checkpoint_updates: updates of a round between two checkpoints of its state.
        verdict_days: how long a closed round's verdicts are kept: days served.
    """

    group_updates: Annotated[int, Within(1, 65_536)] = 128
    checkpoint_updates: Annotated[int, Within(1, 2**31)] = 20_000
    verdict_days: Annotated[int, Within(1, 3650)] = 30


@dataclass(frozen=True, slots=True)
class KeySettings:
    """The table ``[keys]``.

    Attributes:
        descriptor_days: a renewed descriptor holds this long, then devices refuse it.
    """

    descriptor_days: Annotated[int, Within(1, 365)] = 30


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """The table ``[admission]``: what is beyond these shares asks again.

    Attributes:
        opens_share: share of the time for sessions' opens, at most.
        enrolments_share: share of the time for enrolments, at most.
    """

    opens_share: Annotated[float, _SHARE] = 0.35
    enrolments_share: Annotated[float, _SHARE] = 0.15


@dataclass(frozen=True, slots=True)
class ModelsSettings:
    """The table ``[models]``: which versions' models are kept, beside those that are pinned.

    Attributes:
        keep_last: so many of the newest.
        keep_best: so many of the best, by evaluation.best_by.
    """

    keep_last: Annotated[int, Within(1, 10_000)] = 5
    keep_best: Annotated[int, Within(0, 10_000)] = 3


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The table ``[metrics]``.

    Attributes:
        port: for Prometheus; 0: none.
        address: of this machine, on which it is asked.
        token_file: only who says what is in it is told, but for /healthz: "Authorization: Bearer
            TOKEN". Without one nobody is asked who he is.
    """

    port: Annotated[int, Within(0, 65_535)] = 0
    address: str = "127.0.0.1"
    token_file: str | None = None

    def token(self) -> str | None:
        """What is in the file; None without one. Raises AggregatorError."""
        if self.token_file is None:
            return None
        try:
            token = Path(self.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise AggregatorError(
                f"metrics.token_file {self.token_file} cannot be read: {error}"
            ) from None
        if not token.isprintable() or not token:
            raise AggregatorError(f"metrics.token_file {self.token_file} holds no token: one line")
        return token


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """The table ``[console]``.

    Attributes:
        address: of this machine, with a port, where browsers ask; without it there is no console.
        certificate: a file, with its chain: browsers ask by https.
        key: the certificate's file.
        hosts: what else browsers call it than this address and localhost, names without a port.
        trusted_proxy: address or network of a reverse proxy, which says for whom it asks.
        proxy_user_header: the proxy tells the user's name in it, and takes it off what it is sent.
    """

    address: str | None = None
    certificate: str | None = None
    key: str | None = None
    hosts: tuple[str, ...] = ()
    trusted_proxy: str | None = None
    proxy_user_header: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together: name both files, or none")
        if self.proxy_user_header is not None and self.trusted_proxy is None:
            raise ValueError(
                "anybody can send proxy_user_header: say by trusted_proxy whose is believed"
            )
        if self.trusted_proxy is not None:
            try:
                ip_network(self.trusted_proxy, strict=False)
            except ValueError:
                raise ValueError(
                    f"trusted_proxy is {self.trusted_proxy!r}, and has to be an address such as "
                    '"127.0.0.1" or a network such as "10.0.0.0/24"'
                ) from None
        if not _HEADER.fullmatch(self.proxy_user_header or "X-User"):
            raise ValueError(
                f"proxy_user_header is {self.proxy_user_header!r}, and has to be a header's name "
                'such as "X-Remote-User"'
            )
        if self.address is None:
            return
        host, _ = self.place
        if not (self.certificate or self.trusted_proxy or _is_loopback(host)):
            raise ValueError(
                f"at {self.address} others than this machine can ask, and passwords would be sent "
                "in the clear: name certificate and key, or keep to 127.0.0.1, behind a reverse "
                "proxy with TLS, or name the proxy's address as trusted_proxy"
            )

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the address. Raises ValueError."""
        found = _ADDRESS.fullmatch(self.address or "")
        if found is None or int(found[3]) > 65_535:
            raise ValueError(
                f"address is {self.address!r}, and has to be an address of this machine with a "
                'port, such as "127.0.0.1:8443" or "[::1]:8443"'
            )
        return found[1] or found[2], int(found[3])


_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+)):([0-9]{1,5})")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The way to the broker. Its files were readable when the task file was read, and are read
    again at each dial."""

    way: BrokerWay
    prefix: str
    proxy: str | None = None
    """As of :class:`~device_sdk.link.LinkSettings`."""


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """What stands once, in the first task's file: the tables of :data:`FLEET_TABLES`."""

    broker: BrokerSettings
    descriptor_seconds: int
    """What a renewed descriptor holds for."""
    admission: AdmissionSettings
    metrics: MetricsSettings
    console: ConsoleSettings = field(default_factory=ConsoleSettings)
    cluster: Cluster = field(default_factory=Cluster)


FLEET_TABLES = ("broker", "keys", "admission", "metrics", "console", "cluster")


@dataclass(frozen=True, slots=True)
class Task:
    """A whole task file."""

    fleet: SharedSettings
    name: str
    cohort: str
    selector: Selector
    """Which devices it is for."""
    artifacts: tuple[Path, ...]
    """The artifacts' folders, smallest first; none when devices are told of none."""
    companions: tuple[Path, ...]
    """Artifacts that go with them, one for each or none at all (attention's meta-networks)."""
    catalogue: Path | None
    """None for methods on local arrays."""
    broadcast_codec: str
    update_codec: str
    round: RoundSettings
    store: StoreSettings
    models: ModelsSettings
    evaluation: EvaluationSettings | None
    """None: devices evaluate nothing."""
    warm_start: WarmStart | None
    binding: Binding[Any]
    note: str
    """What of the file is without effect, in words; empty for nothing."""
    path: Path = field(compare=False)
    text: str = field(compare=False, repr=False)
    """What the file holds."""

    @property
    def label(self) -> str:
        """What its stored state is of."""
        return f"{self.name} {self.binding.method_name}"

    @property
    def ranking(self) -> Ranking | None:
        """By what versions are compared; None where nothing says so."""
        return None if self.evaluation is None else self.evaluation.ranking

    @property
    def has_control(self) -> bool:
        """Whether its file asks for a control arm."""
        return self.evaluation is not None and self.evaluation.has_control

    @property
    def may_have_control(self) -> bool:
        """Whether its devices can train a model alone (``evaluation.control``)."""
        return not self.binding.why_no_control(len(self.artifacts))


def read_task(path: Path, fleet: SharedSettings | None = None) -> Task:
    """Read and check a task file; paths in it are relative to its folder.

    ``fleet``: for a file beside the first one, which has the fleet's tables. Such a file is named
    after its task. Raises TaskError, which names the file and the key.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not TOML: {error}") from None
    return parse_task(text, path, fleet)


def parse_task(
    text: str, path: Path, fleet: SharedSettings | None = None, source: Path | None = None
) -> Task:
    """What :func:`read_task` makes of a file at ``path`` that holds ``text``.

    ``source``: where the text is from, for messages, if not from there.
    """
    said = source or path
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{said} is not TOML: {error}") from None
    try:
        return task_of(values, path, text, fleet)
    except TaskError as error:
        raise TaskError(f"{said}: {error}") from None


def task_of(
    values: dict[str, Any], path: Path, text: str, fleet: SharedSettings | None = None
) -> Task:
    """What a task file's values make of it; ``text`` is kept as the file's. Raises TaskError."""
    return _task(TomlTable(values), path, text, fleet)


def _fleet(root: TomlTable, folder: Path) -> SharedSettings:
    broker, metrics = (
        _broker(root.table("broker"), folder),
        root.table("metrics").read(MetricsSettings),
    )
    token_file = metrics.token_file
    return SharedSettings(
        broker=broker,
        descriptor_seconds=root.table("keys").read(KeySettings).descriptor_days * _DAY_SECONDS,
        admission=root.table("admission").read(AdmissionSettings),
        metrics=replace(metrics, token_file=token_file and str(folder / token_file)),
        console=_console(root.table("console"), folder),
        cluster=read_cluster(root.table("cluster"), broker.way.url),
    )


def _console(table: TomlTable, folder: Path) -> ConsoleSettings:
    found = table.read(ConsoleSettings)
    # Whether they can be read is asked where they are used: a fleet is served without them.
    certificate, key = found.certificate, found.key
    return replace(
        found,
        certificate=certificate and str(folder / certificate),
        key=key and str(folder / key),
    )


def read_console(path: Path) -> ConsoleSettings:
    """The table ``[console]`` of the first task's file, whatever else stands in it. Raises
    TaskError."""
    try:
        table = TomlTable(tomllib.loads(path.read_text(encoding="utf-8-sig"))).table("console")
        return _console(table, path.parent)
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from None
    except TaskError as error:
        raise TaskError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path} is not TOML: {error}") from None


def _task(root: TomlTable, path: Path, text: str, fleet: SharedSettings | None) -> Task:
    table = root.table("task")
    selector = read_selector(table.table("only"))
    usual = TaskTable() if fleet is None else TaskTable(name=path.stem)
    named = table.read(TaskTable, usual)
    for each in FLEET_TABLES if fleet is not None else ():
        if each in root:
            raise root.error(
                f"[{each}]", "is for the whole fleet: it stands in the first task's file alone"
            )
    if fleet is not None and named.name != path.stem:
        raise table.error("name", f"is {named.name!r}; the file is of the task {path.stem!r}")
    folder = path.parent / (named.folder or "")
    for key in ("name", "cohort"):
        try:
            require_name(key, getattr(named, key))
        except ValueError as error:
            raise table.error(key, f"is no name: {error}") from None
    try:
        binding = read_binding(named.method, root.table(named.method))
    except MethodError as error:
        raise table.error("method", f"cannot be used: {error}") from None
    artifacts, companions = _artifacts(table, named, binding, folder)
    notes = [binding.note] if binding.note else []
    if artifacts and not binding.trains_artifacts:
        artifacts = companions = ()
        notes.append("task.artifact is without effect: with these settings devices train none")
    rounds = root.table("round")
    settings = RoundSettings.read(rounds)
    if settings.late == "staleness" and (obstacle := binding.why_no_staleness()):
        raise rounds.error("late", f"is 'staleness', and {obstacle}")
    evaluation = _evaluation(root, binding, artifacts)
    if evaluation is not None and evaluation.has_control:
        binding = replace(binding, control=True)
    task = Task(
        fleet=_fleet(root, path.parent) if fleet is None else fleet,
        name=named.name,
        cohort=named.cohort,
        selector=selector,
        artifacts=artifacts,
        companions=companions,
        catalogue=_catalogue(table, named, binding, folder),
        broadcast_codec=named.broadcast_codec,
        update_codec=named.update_codec,
        round=settings,
        store=root.table("store").read(StoreSettings),
        models=root.table("models").read(ModelsSettings),
        evaluation=evaluation,
        warm_start=_warm_start(table, named.warm_start, folder),
        binding=binding,
        note="; ".join(notes),
        path=path,
        text=text,
    )
    root.end()
    return task


def _evaluation(
    root: TomlTable, binding: Binding[Any], artifacts: tuple[Path, ...]
) -> EvaluationSettings | None:
    if root.take("evaluation", None) is None:
        return None
    table = root.table("evaluation")
    return read_evaluation(table, artifacts, binding)


def _warm_start(table: TomlTable, said: str | None, folder: Path) -> WarmStart | None:
    try:
        return None if said is None else WarmStart.read(said, folder)
    except ValueError as error:
        raise table.error("warm_start", f"is {said!r}; {error}") from None


def _catalogue(
    table: TomlTable, named: TaskTable, binding: Binding[Any], folder: Path
) -> Path | None:
    if named.catalogue is None and binding.needs_catalogue:
        raise table.error("catalogue", "is missing")
    if named.catalogue is not None and not binding.needs_catalogue:
        raise table.error("catalogue", f"is given, but {binding.method_name} has no items")
    # Whether it can be read is asked where it is: an open round goes on without it.
    return folder / named.catalogue if named.catalogue else None


def _artifacts(
    table: TomlTable, named: TaskTable, binding: Binding[Any], folder: Path
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    if named.artifact is not None and named.artifacts:
        raise table.error("artifact", "and task.artifacts are given: keep one of them")
    key = "artifacts" if named.artifact is None else "artifact"
    listed = named.artifacts if named.artifact is None else (named.artifact,)
    named_folders = [_artifact(table, key, each, folder) for each in listed]
    artifacts = _rungs(table, key, named_folders)
    companions = tuple(_artifact(table, "companions", each, folder) for each in named.companions)
    allowed = binding.artifacts
    if len(artifacts) not in allowed:
        least, most = allowed[0], allowed[-1]
        expected = f"{least}" if least == most else f"{least} to {most}"
        raise table.error(
            "artifacts",
            f"lists {len(artifacts)} artifacts; {binding.method_name} takes {expected}",
        )
    if companions and (why := binding.why_no_companions):
        raise table.error("companions", why)
    if companions and len(companions) != len(artifacts):
        raise table.error(
            "companions", f"lists {len(companions)}; expected one for each artifact, or none"
        )
    return artifacts, companions


def _rungs(table: TomlTable, key: str, folders: Sequence[Path]) -> tuple[Path, ...]:
    """The artifacts in these folders, of a ladder its rungs. What else is wrong with one is told
    where it is read."""
    found: list[Path] = []
    for each in folders:
        try:
            found += rung_folders(each)
        except ArtifactError as error:
            raise table.error(key, f"{each} is no whole ladder: {error}") from None
    return tuple(found)


def _artifact(table: TomlTable, key: str, value: str, folder: Path) -> Path:
    if not value.startswith(SHIPPED_PREFIX):
        return _existing(table, key, value, folder)
    path = shipped_folder() / value.removeprefix(SHIPPED_PREFIX)
    if path.is_dir():
        return path
    raise table.error(key, f"is {value!r}, which is not shipped; shipped is 'shipped:mf'")


def shipped_folder() -> Path:
    """Where the artifacts lie that come with the SDK."""
    # Found without importing device_sdk, which the server may lack the dependencies for.
    spec = importlib.util.find_spec("device_sdk")
    places = (spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) / "artifacts" if places else Path("artifacts")


def _existing(table: TomlTable, key: str, value: str, folder: Path) -> Path:
    path = folder / value
    if not path.exists():
        raise table.error(key, f"names {path}, which does not exist")
    return path


def _broker(table: TomlTable, folder: Path) -> BrokerSettings:
    named = table.read(BrokerTable)
    try:
        url = parse_broker_url(named.url)
    except ValueError as error:
        raise table.error("url", f"is not usable: {error}") from None
    try:
        Topics(named.prefix)
    except ValueError as error:
        raise table.error("prefix", f"is not usable: {error}") from None
    try:
        proxy_for(url, named.proxy)
    except ValueError as error:
        raise table.error("proxy", f"is not usable: {error}") from None
    if named.user is not None:
        url = replace(url, user=named.user)
    if named.password_file is not None and url.user is None:
        raise table.error("password_file", "is given without broker.user")
    files = {
        key: _existing(table, key, value, folder)
        for key in ("ca_file", "certificate_file", "key_file")
        if (value := getattr(named, key)) is not None
    }
    if files and not url.tls:
        raise table.error(
            next(iter(files)), f"is given, but broker.url starts with {url.scheme}://"
        )
    if "key_file" in files and "certificate_file" not in files:
        raise table.error("key_file", "is given without broker.certificate_file")
    tls = None
    if files:
        tls = TlsFiles(files.get("ca_file"), files.get("certificate_file"), files.get("key_file"))
    password_file = None
    if named.password_file is not None:
        password_file = (folder / named.password_file).absolute()
    try:
        way = BrokerWay(url, password_file, tls, named.client_id_prefix)
    except ValueError as error:
        raise table.error("client_id_prefix", f"is not usable: {error}") from None
    try:
        way.password()
    except ValueError as error:
        raise table.error("password_file", f"cannot be read: {error}") from None
    return BrokerSettings(way, named.prefix, named.proxy)


# The operator's list of items: a table with one item a row, and its title where it has one.


def read_catalogue_file(path: Path) -> Catalogue:
    """Row 0 is the file's first item. Raises AggregatorError, naming the line."""
    return understood_catalogue(path)[0]


def understood_catalogue(path: Path) -> tuple[Catalogue, str]:
    """The same, and what was understood of the file, for people. Raises AggregatorError.

    Titles are one line: white space in them, line breaks too, becomes a space.
    """
    try:
        table = open_table(path, one_column=names_a_catalogue)
        columns = catalogue_columns(table)
        rows = list(islice(table.rows(), bool(columns.header), None))
    except TableError as error:
        raise AggregatorError(f"the catalogue {error}") from None
    except (OSError, ValueError) as error:
        raise AggregatorError(f"the catalogue {path} cannot be read: {error}") from None
    while rows and not any(map(str.strip, rows[-1])):
        del rows[-1]  # empty lines at the end
    header, many = list(columns.header), len(rows)
    if header:  # again, where files were put together
        rows = [row for row in rows if [cell.strip() for cell in row] != header]
    again = f"; left out: {many - len(rows):,} that repeat the header" if many > len(rows) else ""
    items, titles = (
        tuple(_cell(row, places, table, columns) for row in rows)
        for places in columns.places.values()
    )
    try:
        if table.damaged and any(UNREADABLE in each for each in items):
            raise ValueError("ids hold bytes that are not UTF-8")
        found = Catalogue(items, tuple(" ".join(each.split()) for each in titles))
    except ValueError as error:
        first = 1 + table.skipped + bool(columns.header)
        raise AggregatorError(
            f"the catalogue {path} is not usable: {error} (row 0 is line {first})"
        ) from None
    titled = sum(map(bool, found.titles))
    said = f"{len(found):,} items, {titled:,} with titles; {columns.said(table.width)}{again}"
    return found, said


def _cell(row: Sequence[str], places: Sequence[int], table: TextTable, columns: Columns) -> str:
    """A row's item, or its title, which takes the cells that a row has too many: a title holds the
    separator more likely than an id does."""
    if not places:
        return ""
    (place,), surplus = places, max(0, len(row) - table.width)
    title = columns.places["title"]
    if surplus and title and place > title[0]:
        place += surplus
    if places != title or not surplus:
        return row[place].strip() if place < len(row) else ""
    return table.separator.join(row[place : place + 1 + surplus]).strip()


def stored_catalogue(store: TaskStore) -> Catalogue | None:
    """The items that rows of any of the task's versions belong to; None where it never had any.

    It only ever grows at its end, and stays when the task is replaced by one without items.
    """
    content = store.facts.catalogue
    return None if content is None else decode(Catalogue, content)


def served_catalogue(store: TaskStore, task: Task) -> Catalogue | None:
    """What the present model's rows belong to; None before the first ``serve``, and for a method
    without items."""
    return None if task.catalogue is None else stored_catalogue(store)


def read_continued_catalogue(path: Path, store: TaskStore) -> Catalogue:
    """The file's catalogue. Raises AggregatorError also when a stored row would change its item.

    Items are appended, never moved or removed: devices and the model know them by their rows.
    """
    catalogue, known = read_catalogue_file(path), stored_catalogue(store)
    if known is not None and not catalogue.extends(known):
        raise AggregatorError(
            f"the catalogue does not begin with the {len(known)} items that it had: append new "
            "items at the end, and keep those that are no longer offered"
        )
    return catalogue
