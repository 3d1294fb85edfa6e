"""A fleet as its operator has it: all that is known of it, and all that is done with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.folder import USUAL_LIVES, Lives, rotate_keys, rotate_root
from aggregator.keys.registry import revoke
from aggregator.models import Format
from aggregator.operate import invitations, moving, tasks, versions
from aggregator.operate.audit import DONE, AuditEntry, AuditLog, system_user
from aggregator.operate.checking import USUAL_LOOK, Checked, Looking, check_files
from aggregator.operate.comparing import VersionComparison, compare_versions
from aggregator.operate.devices import (
    DeviceHistory,
    DeviceReader,
    DevicesFound,
    DeviceState,
    FleetDevice,
    LabelledDevice,
    RevokedDevice,
    changed_labels,
    find_devices,
    history_of,
    require_device_name,
)
from aggregator.operate.health import FleetHealth, Rollback
from aggregator.operate.invitations import UnusedCode
from aggregator.operate.lookup import device_of, require_number, task_of, tasks_of
from aggregator.operate.moving import FleetBroker
from aggregator.operate.restoring import begin_generation
from aggregator.operate.rounds import ReleasedRound, release
from aggregator.operate.runs import USUAL_FOLDER, RunSummary, SimulationRecord, runs_in
from aggregator.operate.tasks import (
    STEP_SECONDS,
    WAIT_SECONDS,
    PauseChange,
    TaskChange,
    TaskSummary,
    Waited,
)
from aggregator.operate.training import FleetTraining, timed_of
from aggregator.operate.versions import FleetEvaluations, FleetVersions, ModelFiles
from aggregator.store import Store
from aggregator.store.rows import RoundRow, StoredReport
from device_sdk.link.broker_url import printed_url
from device_sdk.system.printable import in_words
from device_sdk.wire.seal.descriptor import SERIAL_LIMIT, Descriptor
from device_sdk.wire.seal.keys import RandomBytes


class Fleet:
    """A fleet, by the folder of its aggregator, whether that serves or not: all that the commands
    show and do. To be used in a ``with``, or closed.

    Each call is a transaction of its own, and true of the moment at which it is made. Calls may
    come from any thread, one at a time. All of them raise AggregatorError for what cannot be done,
    in words for people. What changes something is noted in the home's audit log.

    ``task`` names one; None: the only one there is. ``device``: a name, or the first digits of an
    id. Times are in Unix seconds.
    """

    def __init__(
        self,
        home: AggregatorHome,
        store: Store,
        *,
        actor: str,
        clock: Callable[[], float] = time.time,
        random_bytes: RandomBytes = os.urandom,
    ) -> None:
        self.home, self._store = home, store
        self.actor = actor
        self._clock, self._random_bytes = clock, random_bytes
        self._audit = AuditLog(home.audit_file)

    @classmethod
    def open(
        cls,
        home: str | Path,
        *,
        actor: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Fleet:
        """The fleet of the folder ``home``.

        Args:
            actor: who does what is done, for the audit log; None: the operating system's user.
            clock: Unix time.
        """
        found = AggregatorHome.found(Path(home))
        return cls(found, found.open_store(), actor=actor or system_user(), clock=clock)

    def close(self) -> None:
        """Let go of the store. May be called twice."""
        self._store.database.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def now(self) -> float:
        """Unix seconds, by which it goes."""
        return self._clock()

    @contextmanager
    def _doing(self, action: str, **arguments: object) -> Iterator[dict[str, object]]:
        """Note it, with its outcome; what is given may be added to."""
        given = {name: each for name, each in arguments.items() if each is not None}
        said = {name: each for name, each in given.items() if each is not False and each != {}}
        outcome = DONE
        try:
            yield said
        except AggregatorError as error:
            outcome = str(error)
            raise
        except BaseException as error:
            outcome = in_words(error)
            raise
        finally:
            self._audit.add(AuditEntry(self._clock(), self.actor, action, said, outcome))

    def audit(self, count: int = 100) -> list[AuditEntry]:
        """What was done last, the newest last."""
        try:
            return self._audit.newest(count)
        except OSError as error:
            raise AggregatorError(f"{self.home.audit_file} cannot be read: {error}") from None

    # -- devices -----------------------------------------------------------------------------------

    def devices(self, task: str | None = None) -> list[FleetDevice]:
        """All of them, revoked ones too, in the order in which they joined: with what they did in
        all tasks, or in this one."""
        chosen = {row.name for row in tasks_of(self._store, task)}
        read = DeviceReader(self.home, self._store, self._clock(), chosen).read
        return [read(row) for row in self._store.devices.all()]

    def device(self, device: str) -> FleetDevice:
        """One of them."""
        row = device_of(self._store, device)
        return DeviceReader(self.home, self._store, self._clock(), rows=[row]).read(row)

    def find_devices(
        self,
        text: str = "",
        *,
        labels: Mapping[str, str] | None = None,
        state: DeviceState | None = None,
        task: str | None = None,
        first: int = 0,
        most: int = 100,
    ) -> DevicesFound:
        """Devices of a large fleet, ``most`` at once, in the order in which they joined.

        Args:
            text: in their names or the labels that the operator gave them, or the first digits of
                their ids.
            labels: of the operator, that they must have.
            task: that they are meant for, or took part in; None: any.
            first: how many to pass over.
        """
        return find_devices(
            self.home,
            self._store,
            self._clock(),
            text=text,
            labels=labels or {},
            state=state,
            task=task,
            first=first,
            most=most,
        )

    def history(self, device: str) -> list[DeviceHistory]:
        """What a device told of the last rounds, by task."""
        return history_of(self._store, device_of(self._store, device))

    def training(self, task: str | None = None) -> FleetTraining:
        """What devices train, and what rounds take them."""
        return FleetTraining.read(self.home, self._store, task_of(self._store, task))

    def timed(self, task: str | None = None, most: int = 1000) -> list[StoredReport]:
        """What devices trained, and in what time: of the newest ``most`` reports the last one of
        each device."""
        return timed_of(self._store, task_of(self._store, task), most)

    def revoke(self, device: str) -> RevokedDevice:
        """Send a device away for good."""
        with self._doing("revoke", device=device) as said, self._store.database.transaction():
            row = device_of(self._store, device)
            said["device"] = row.device_id.hex()
            done = revoke(self._store, row.device_id, int(self._clock()))
        return RevokedDevice(row.device_id.hex(), before=not done)

    def label(
        self, device: str, labels: Mapping[str, str] | None = None, name: str | None = None
    ) -> LabelledDevice:
        """Change a device's labels, of which an empty value takes one away, and its name."""
        changes = dict(labels or {})
        doing = self._doing("label", device=device, labels=changes, name=name)
        with doing as said, self._store.database.transaction():
            if name is not None:
                require_device_name(name)
            row = device_of(self._store, device)
            said["device"] = row.device_id.hex()
            found = changed_labels(changes, row.labels)
            self._store.devices.set_labels(row.device_id, found)
            if name is not None:
                self._store.devices.set_name(row.device_id, name)
        return LabelledDevice(row.device_id.hex(), row.name if name is None else name, found)

    # -- enrolment codes ---------------------------------------------------------------------------

    def invite(
        self,
        count: int = 1,
        expires_seconds: int = invitations.DAY_SECONDS,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        replaces: str | None = None,
        out: Path | None = None,
    ) -> list[str]:
        """Codes, each of which lets one device join, once. They can be had only here.

        Args:
            expires_seconds: how long they can be used.
            name, labels: of the device that joins with it.
            replaces: a device that is revoked in exchange, of one code.
            out: a new file, which has them before anything else happens.
        """
        given = dict(labels or {})
        doing = self._doing(
            "invite",
            count=count,
            expires_seconds=expires_seconds,
            name=name,
            labels=given,
            replaces=replaces,
            out=out,
        )
        with doing:
            return invitations.invite(
                self._store,
                int(self._clock()),
                self._random_bytes,
                count=count,
                expires_seconds=expires_seconds,
                name=name,
                labels=given,
                replaces=replaces,
                out=out,
            )

    def unused_codes(self) -> list[UnusedCode]:
        """Codes that can still be used, without their secrets."""
        return invitations.unused_codes(self._store, int(self._clock()))

    def withdraw(self, code_id: str) -> UnusedCode:
        """Have nobody join with a code any more, by the first digits of its id or the whole of
        it."""
        code_id = invitations.code_id_of(code_id)
        with self._doing("withdraw", code=code_id):
            return invitations.withdraw(self._store, code_id, int(self._clock()))

    # -- tasks and their rounds --------------------------------------------------------------------

    def tasks(self) -> list[TaskSummary]:
        """All that are not retired, the first one first."""
        return [TaskSummary.read(self._store, row) for row in self._store.tasks.all()]

    def rounds(self, task: str | None = None, count: int = 10) -> list[RoundRow]:
        """A task's newest rounds, the newest first."""
        return self._store.task(task_of(self._store, task).number).rounds.latest(count)

    def health(self, task: str | None = None, rounds: int = 10) -> FleetHealth:
        """How the fleet does now, and what is wrong with it, or with one task; read as it is asked,
        until this fleet is closed. ``rounds``: as many of each task's last ones."""
        chosen = tasks_of(self._store, task)
        return FleetHealth(self.home, self._store, self._clock(), chosen, rounds)

    def refusals(self) -> dict[str, int]:
        """How often something was refused, by the reason."""
        return self._store.refusals.all()

    def release(self, task: str | None = None) -> list[ReleasedRound]:
        """Let held rounds go on: of all tasks, or of one."""
        with self._doing("release", task=task):
            chosen = tasks_of(self._store, task)
            found = [release(self._store.task(row.number), row.name or "") for row in chosen]
            if not any(found):
                raise AggregatorError("no round is held")
        return [each for each in found if each is not None]

    def pause(self, task: str) -> PauseChange:
        """Open no further round; one that is open ends as usual."""
        with self._doing("pause", task=task):
            return tasks.pause(self._store, task)

    def resume(self, task: str) -> PauseChange:
        """Open rounds again."""
        with self._doing("resume", task=task):
            return tasks.resume(self._store, task)

    def add_task(
        self,
        name: str,
        file: Path | None = None,
        *,
        text: str | None = None,
        step_seconds: float = STEP_SECONDS,
    ) -> TaskChange:
        """Another task, by a task file, its text, or the home's ``tasks/NAME.toml``. Its artifacts
        are tried first, for ``step_seconds`` a step at most: it takes a while."""
        with self._doing("add task", task=name, file=file):
            return tasks.add(
                self.home,
                self._store,
                name,
                self._clock(),
                file=file,
                text=text,
                step_seconds=step_seconds,
            )

    def replace_task(
        self,
        name: str,
        file: Path | None = None,
        *,
        text: str | None = None,
        warm_start: str | None = None,
        now: bool = False,
        step_seconds: float = STEP_SECONDS,
    ) -> TaskChange:
        """A task's artifact, method or settings become those of a task file, or its text.

        Args:
            warm_start: the model that it begins with, where names and shapes fit: "latest", "best",
                a version's number, another task's as "air@best", or a safetensors file.
            now: give the open round up.
        """
        doing = self._doing("replace task", task=name, file=file, warm_start=warm_start, now=now)
        with doing:
            return tasks.replace_task(
                self.home,
                self._store,
                name,
                file=file,
                text=text,
                warm_start=warm_start,
                now=now,
                step_seconds=step_seconds,
            )

    def retire_task(self, name: str) -> TaskChange:
        """End a task for good: its model and its rounds are deleted."""
        with self._doing("retire task", task=name):
            return tasks.retire(self._store, name)

    def wait(self, asked: TaskChange, seconds: float = WAIT_SECONDS) -> Waited:
        """Wait until ``serve`` has done it; at once, where none runs."""
        return tasks.wait_for(self.home, self._store, asked, seconds)

    def file_of(self, task: str, version: int | None = None) -> str:
        """A task's file as it is served, or that under which a version was made, which is without
        the fleet's tables."""
        return tasks.shown_file(self.home, self._store, task, version)

    def files_not_added(self) -> list[str]:
        """The names of task files in the home that are no task's yet."""
        return tasks.files_not_added(self.home, self._store)

    def check(
        self,
        file: Path | None = None,
        *,
        replaces: str | None = None,
        warm_start: str | None = None,
        looking: Looking = USUAL_LOOK,
    ) -> list[Checked]:
        """What is found of a task file, of all that there are without one; nothing is changed.

        Args:
            replaces: the task that it is to take the place of.
            warm_start: as of :meth:`replace_task`.
        """
        return check_files(self.home, self._store, file, replaces, warm_start, looking)

    # -- versions of the model ---------------------------------------------------------------------

    def versions(self, task: str | None = None, *, dropped: bool = False) -> FleetVersions:
        """Those whose models are kept; ``dropped``: and all others that there were."""
        row = task_of(self._store, task)
        return FleetVersions.read(self.home, self._store, row, dropped=dropped)

    def evaluations(self, task: str | None = None, count: int = 10) -> FleetEvaluations:
        """How good the newest versions are, as devices found out."""
        row = task_of(self._store, task)
        return FleetEvaluations.read(self.home, self._store, row, count)

    def compare(self, one: int, other: int, task: str | None = None) -> VersionComparison:
        """Two versions: their figures, and the settings in which their task files differ."""
        row = task_of(self._store, task)
        return compare_versions(self.home, self._store, row, one, other)

    def pin(self, version: int, task: str | None = None) -> None:
        """Keep a version's model for good."""
        with self._doing("pin", task=task, version=version):
            versions.pin(self._store, task_of(self._store, task), version)

    def unpin(self, version: int, task: str | None = None) -> None:
        """Keep it for as long as the others."""
        with self._doing("unpin", task=task, version=version):
            versions.unpin(self._store, task_of(self._store, task), version)

    def rollback(self, version: int, task: str | None = None) -> TaskChange:
        """An older version's model becomes the next version."""
        with self._doing("rollback", task=task, version=version):
            number = task_of(self._store, task).number
            return tasks.go_back(self.home, self._store, number, version)

    def cancel_rollback(self, task: str | None = None) -> Rollback:
        """Leave out the one that waits for its turn: what that was."""
        with self._doing("cancel rollback", task=task):
            return versions.stay(self._store, task_of(self._store, task).number)

    def model(
        self, version: str = "latest", task: str | None = None, form: Format = "safetensors"
    ) -> ModelFiles:
        """A version's model as a file: "latest", "best" or a number."""
        with self._doing("export model", task=task, version=version, form=form) as said:
            found = versions.model_of(
                self.home, self._store, task_of(self._store, task), version, form
            )
            said["version"] = found.version
            return found

    # -- runs of simulate --------------------------------------------------------------------------

    def runs(self) -> list[RunSummary]:
        """Those whose records lie in the home's folder ``runs``, the latest first."""
        folder = self.home.folder / USUAL_FOLDER
        return runs_in(folder) if folder.exists() else []

    def run(self, name: str) -> SimulationRecord:
        """One of them."""
        found = next((each for each in self.runs() if each.name == name), None)
        if found is None:
            raise AggregatorError(f"there is no run {name!r} in {self.home.folder / USUAL_FOLDER}")
        return SimulationRecord.read(found.path)

    # -- keys --------------------------------------------------------------------------------------

    def rotate_keys(self, lives: Lives = USUAL_LIVES, *, after: int = 0) -> Descriptor:
        """New serving keys, as ``rotate keys`` makes them."""
        with self._doing("rotate keys"):
            require_number("the serial to begin after", after, 0, SERIAL_LIMIT)
            now = int(self._clock())
            return rotate_keys(self.home, self._store, now, self._random_bytes, lives, after=after)

    def rotate_root(self, lives: Lives = USUAL_LIVES) -> Descriptor:
        """A new root key, and new serving keys with it."""
        with self._doing("rotate root"):
            now = int(self._clock())
            return rotate_root(self.home, self._store, now, self._random_bytes, lives)

    def rotate_group(self) -> None:
        """A new group key from the next round on."""
        with self._doing("rotate group"):
            self._store.facts.rotation_due = True

    # -- where it is -------------------------------------------------------------------------------

    def broker(self) -> FleetBroker:
        """Where ``serve`` is, and what there is to say of a move."""
        return FleetBroker.read(self.home, self._store, self._clock())

    def move_broker(
        self,
        url: str,
        grace_seconds: int = 7 * invitations.DAY_SECONDS,
        *,
        own: str | None = None,
        **parts: str | None,
    ) -> None:
        """Move the fleet to another broker: ``serve`` is at both until ``grace_seconds`` are over
        and a device has been there.

        Args:
            url: the new one's, as devices see it.
            own: by which this machine reaches it; None: by ``url`` too.
            parts: what is another one there than at the broker before, of ``user``,
                ``password_file``, ``ca_file``, ``certificate_file``, ``key_file`` and
                ``client_id_prefix``.
        """
        doing = self._doing(
            "move broker",
            url=printed_url(url),
            grace_seconds=grace_seconds,
            own=None if own is None else printed_url(own),
            **parts,
        )
        with doing, self._store.database.transaction():  # another operator may be at it, too
            moving.move(self.home, self._store, self._clock(), url, grace_seconds, own, parts)

    def stay_at_broker(self) -> None:
        """Call the move off."""
        with self._doing("stay at broker"), self._store.database.transaction():
            moving.stay(self.home, self._store, self._clock())

    def move_store(self, *, back: bool = False) -> None:
        """Move everything from the home's file into the database that the task file names, or
        back into a file. No ``serve`` may run."""
        with self._doing("move store", back=back):
            url = self.home.named_store()
            if not back and url is None:
                raise AggregatorError(
                    f'{self.home.task_file} names no database: write store = "postgresql://..." '
                    "under [cluster] first"
                )
            self.close()
            try:
                if back:
                    self.home.move_store_back()
                    self.home = AggregatorHome(self.home.folder)
                else:
                    moved = AggregatorHome(self.home.folder, url)
                    moved.move_store()
                    self.home = moved
            finally:
                self._store = self.home.open_store()

    def restored(self, *, after: int = 0) -> int:
        """To be called once after the home was put back from a backup, while no ``serve`` runs; the
        generation that begins. Devices accept rounds only in a new one, and the open round is given
        up. ``after``: it begins after this time, whatever the clock says."""
        with self._doing("restored", after=after or None) as said:
            now = int(self._clock())
            said["generation"] = found = begin_generation(
                self.home, self._store, now, after, self._random_bytes
            )
        return found
