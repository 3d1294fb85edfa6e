"""The device: one class for an app that embeds Tessera."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from device_sdk.agent import Background
from device_sdk.enrol import FleetAddress, enrol
from device_sdk.errors import HomeError, LeaveUnanswered, NotEnrolled
from device_sdk.events import (
    Callbacks,
    ConnectedEvent,
    EventName,
    ModelEvent,
    Observer,
    ProblemEvent,
    RoundEvent,
)
from device_sdk.factorisation import packaged_artifacts
from device_sdk.forecaster import Forecaster
from device_sdk.home.home import Home, forget
from device_sdk.link import LinkSettings
from device_sdk.link.broker_url import BrokerWay, TlsFiles
from device_sdk.local_data import DataSource, LocalData
from device_sdk.local_model import LocalModel, local_model
from device_sdk.recommender import Recommender
from device_sdk.status import DeviceStatus, TaskStatus
from device_sdk.system.clock import Clock, awake_clock
from device_sdk.system.lock import ForkedError, Owner
from device_sdk.wire.codec.message import require_name
from device_sdk.world import DeviceWorld, Pace, TrainingOptions, installed_artifacts

Folder = str | os.PathLike[str]
_FORGET_SECONDS = 30.0
Data = LocalData | DataSource | Mapping[str, LocalData | DataSource]
"""Samples, or a function that gives them; or such by the names of tasks."""


class Device:
    """A member of a fleet: records, learns in the background, recommends or predicts.

    Made by :meth:`enrol` (once) or :meth:`open` (afterwards). A context manager: leaving it stops
    and closes. All methods may be called from any thread, and none waits for the network but
    :meth:`enrol`. Nothing that is recorded leaves the device; a round sends one sealed update.

    It is of the process that opened it: in a fork its methods raise :class:`HomeError`, and
    ``stop`` and ``close`` do nothing.
    """

    def __init__(self, world: DeviceWorld, data: Data | None = None) -> None:
        """For :meth:`open`, and for tests that bring a world of their own. Takes its home over."""
        self._owner = Owner(f"the device of {world.home.folder}")
        self._sources: Mapping[str, DataSource] = {}
        self._world = world = replace(world, data=lambda: self._sources)
        self._home = world.home
        self._recommenders: dict[str, Recommender] = {}
        self._forecaster_of = cache(lambda task: Forecaster(world.of_task(task, "")))
        self._callbacks = Callbacks()
        self._observer = Observer(world, self._callbacks)
        self._background = Background(world, self._observer)
        if data is not None:
            self.provide(data)
        self._closed = False

    @classmethod
    def enrol(
        cls,
        url: str,
        code: str,
        home: Folder = "~/.tessera",
        *,
        user: str | None = None,
        password_file: Folder | None = None,
        tls: TlsFiles | None = None,
        client_id_prefix: str = "",
        prefix: str = "tessera",
        task: str | None = None,
        cohort: str | None = None,
        timeout_seconds: float = 30.0,
        options: TrainingOptions | None = None,
        pace: Pace | None = None,
        link_settings: LinkSettings | None = None,
        work_clock: Clock | None = None,
        data: Data | None = None,
        tasks: Iterable[str] | None = None,
    ) -> Device:
        """Join a fleet with a code from ``tessera-aggregator invite``, and open the device.

        Args:
            url: ``mqtt://host``, ``mqtts://host:8883``, ``mqtts://user:password@host``, or MQTT in
                a WebSocket: ``ws://host``, ``wss://host/mqtt``.
            code: used up by the first device that sends it.
            home: a folder of this device's own, made if missing, readable by its owner only.
            user: who this device is to the broker, where the URL does not say it.
            password_file: the password of that user, in a file of its own.
            tls: CA file and client certificate; the system's authorities without. These files and
                ``password_file`` are kept by their paths, and read again at each connection.
            client_id_prefix: where the broker asks for client ids that begin with something.
            prefix: as `invite` printed it; mostly this default.
            task: take part in this task alone, the others of the fleet are none of this device's;
                None: in all that are for it.
            cohort: of that task, likewise.
            timeout_seconds: how long to wait for broker and aggregator.
            options: as in :meth:`open`, and so are all that follow.
            pace: how much of a day and of the processor training may take.
            link_settings: of the connection to the broker.
            work_clock: by which training is timed.
            data: what tasks train on.
            tasks: those that are trained.

        Raises :class:`AlreadyEnrolled`, :class:`EnrolmentRefused` (the code is wrong, used or
        expired, or others than this task and cohort are served there), :class:`EnrolmentFailed`
        (nobody answered; the same call may be made again), :class:`HomeLocked`,
        :class:`HomeBroken`, and ValueError for a bad URL.
        """
        opened = Home(_folder(home), create=True)
        try:
            settings = link_settings if link_settings is not None else LinkSettings()
            enrol(
                opened,
                FleetAddress(
                    BrokerWay.parse(
                        url,
                        user=user,
                        password_file=password_file,
                        tls=tls,
                        client_id_prefix=client_id_prefix,
                    ),
                    prefix,
                    task,
                    cohort,
                ),
                code,
                clock=awake_clock,
                rng=np.random.default_rng(),
                timeout_seconds=timeout_seconds,
                link_settings=settings,
            )
            return cls(
                _world(
                    opened,
                    options=options,
                    pace=pace,
                    link_settings=settings,
                    work_clock=work_clock,
                    tasks=tasks,
                ),
                data,
            )
        except BaseException:
            opened.close()
            raise

    @classmethod
    def open(
        cls,
        home: Folder = "~/.tessera",
        *,
        read_only: bool = False,
        broker: BrokerWay | None = None,
        options: TrainingOptions | None = None,
        pace: Pace | None = None,
        link_settings: LinkSettings | None = None,
        work_clock: Clock | None = None,
        data: Data | None = None,
        tasks: Iterable[str] | None = None,
    ) -> Device:
        """Open an enrolled device. Touches no network.

        Args:
            home: the folder that was enrolled.
            read_only: only ``recommend``, ``predict`` and ``status``; works beside a process that
                runs the device.
            broker: another way to the fleet's broker than the one that the home has, kept there
                from now on: :meth:`BrokerWay.parse
                <device_sdk.link.broker_url.BrokerWay.parse>`. An app may give the same at each
                start: a move that the aggregator announced since is not undone by it.
            options: a fixed k, emulated slowness, privacy: :class:`TrainingOptions`.
            pace: waits.
            link_settings: the connection's limits and times.
            work_clock: times the training; the machine's own when None.
            data: see :meth:`provide`.
            tasks: take part in these, whatever was said when it was enrolled; None: in those.

        Raises :class:`NotEnrolled`, :class:`HomeLocked` (another process has it open),
        :class:`HomeBroken`.
        """
        opened = Home(_folder(home), read_only=read_only)
        try:
            if broker is not None and not read_only:
                opened.membership.give_way(broker)
            return cls(
                _world(
                    opened,
                    options=options,
                    pace=pace,
                    link_settings=link_settings,
                    work_clock=work_clock,
                    tasks=tasks,
                ),
                data,
            )
        except BaseException:
            opened.close()
            raise

    @property
    def device_id(self) -> str:
        """32 hexadecimal digits that the aggregator drew."""
        return self._world.membership.grant.device_id.hex()

    @property
    def home(self) -> Path:
        """The home folder."""
        return self._home.folder

    def record(self, item: str, user: str = "default", *, task: str | None = None) -> bool:
        """Note that a local user touched an item; whether that was news. On disk on return.

        ``item`` is the app's own id. One that the task's catalogue does not know is kept and takes
        part once the catalogue does. ``task``: the one that learns from it; without a name that is
        the task that the device was enrolled with, or else the first one that trains on what is
        recorded, and that for good. Raises ValueError for an empty or overlong text.
        """
        return self.record_all([(item, user)], task=task) == 1

    def record_all(self, pairs: Iterable[tuple[str, str]], *, task: str | None = None) -> int:
        """:meth:`record` for many (item, user) pairs in one commit; how many were news.

        Raises ValueError for what is no pair of texts; nothing is recorded then.
        """
        self._require_open(writing=True)
        return self._home.interactions.add(map(_user_and_item, pairs), _name(task))

    def provide(self, data: Data, *, task: str | None = None) -> None:
        """Give the samples that tasks on arrays train on; they stay on this device.

        ``data``: the samples, or a function that gives them, called on the device's thread at the
        start of each round; or several of them by the names of tasks. ``task``: whose they are;
        without a name they are for the task that the device was enrolled with, or the only one that
        could use them. Data by a task's name also say that the device takes part in it. May be
        called at any moment, and again with other data. Not kept in the home folder: an app gives
        its data each time it opens the device. Raises ValueError for what is no task's name.
        """
        self._require_here()
        if isinstance(data, Mapping):
            given = {_name(name): each for name, each in data.items()}
        else:
            given = {_name(task): data}
        sources = {
            name: each if callable(each) else partial(_itself, each) for name, each in given.items()
        }
        self._sources = {**self._sources, **sources}
        self._background.wake()  # a task's name may be one more to take part in

    def tasks(self) -> tuple[TaskStatus, ...]:
        """Every task that this device has heard of: whether it takes part, and if not, why."""
        self._require_open(writing=False)
        return self._background.tasks()

    def start(self) -> None:
        """Take part in rounds from now on, in a background thread. Does nothing if it runs; one
        that ends its training after a :meth:`stop` is followed by another.

        Raises :class:`NotEnrolled` for a device that has left its fleet.
        """
        self._require_open(writing=True)
        if self._has_left():
            raise NotEnrolled(
                "this device left its fleet: to join again, enrol with a new code and a new home"
            )
        self._background.start()

    def stop(self, timeout_seconds: float = 10.0) -> bool:
        """Stop taking part; whether the thread ended in time. May be called at any moment.

        A training in progress is finished first; one that is not over just before
        ``timeout_seconds`` is ended, and its round trained again if it is still open after the next
        :meth:`start`. What waits in the outbox is sent then, in this process or another. In a fork
        nothing runs, and nothing happens.
        """
        return not self._owner.is_here or self._background.stop(timeout_seconds)

    def leave(self, timeout_seconds: float = 30.0) -> None:
        """Leave the fleet for good: the aggregator forgets this device as if it had been revoked.

        It takes part in nothing from then on, and what waits in the outbox is not sent. What other
        devices or the aggregator would be told of it is dropped, at the end of the open round at
        the latest; what was counted stays in the sums. What was learnt stays here, and
        :meth:`recommend` and :meth:`predict` go on. To join again takes a new code and a new home.

        Waits for the aggregator's answer. Raises :class:`LeaveUnanswered` where none comes in time
        (the call may be made again, or the operator revokes the device) and :class:`HomeError`
        where a training in progress does not end.
        """
        self._require_open(writing=True)
        if self._has_left():
            return
        with self._background.paused(timeout_seconds) as ended:
            if not ended:
                raise HomeError("the device is still training; call leave() again later")
            problem = "" if self._has_left() else self._background.leave(timeout_seconds)
            if problem:
                raise LeaveUnanswered(
                    f"the aggregator did not confirm within {timeout_seconds:g} s ({problem}): "
                    "call leave() again, or ask its operator to revoke this device"
                )
            self.stop()

    def forget(self, user: str | None = None, item: str | None = None) -> int:
        """Remove interactions from this device's home; how many.

        Args:
            user: all of this local user's, with the user's name and vector; with ``item``, that
                one alone.
            item: of every local user. Vectors stay, and are trained without it from the next round.

        What the home's file held of them is overwritten. What was shared before, in updates that
        were counted or wait in the outbox, cannot be taken back by this. A training in progress is
        waited for. Raises :class:`UnknownUser`, ValueError where neither is given, and
        :class:`HomeError` where a training does not end within 30 seconds.
        """
        self._require_open(writing=True)
        if user is None and item is None:
            raise ValueError("forget() takes a user, an item, or both")
        with self._background.paused(_FORGET_SECONDS) as ended:
            if not ended:
                raise HomeError("the device is still training; call forget() again later")
            try:
                return forget(self._home, user, item)
            finally:
                for recommender in self._recommenders.values():
                    recommender.reload()

    def recommend(
        self, count: int = 10, user: str | None = None, *, task: str | None = None
    ) -> list[tuple[str, float]]:
        """The ``count`` best items that the user has not touched, as (item, score), best first.

        ``user``: without a name the only one here, or of several the one that is named ``default``,
        as in :meth:`record`.

        Works offline, from the last round that this device trained, with all columns of the model
        whatever its own k is. ``task``: needed where there are several that recommend. Raises
        :class:`UnknownUser`, :class:`NothingLearnt`, ValueError for a negative count, and for a
        task that is not known, or not named among several.
        """
        self._require_open(writing=False)
        return self._recommender(task).recommend(count, user)

    def predict(
        self, batch: Mapping[str, NDArray[Any]], *, task: str | None = None
    ) -> dict[str, NDArray[Any]]:
        """What the task's model, as this device last trained it, says of a batch.

        ``batch`` holds the artifact's inputs by name, a row for each sample; the answer its outputs
        by name. Works offline, and while a round is trained. ``task``: needed where there are
        several that predict. Raises :class:`NothingLearnt` before the first round, and for tasks
        that recommend; BatchError for a batch that does not fit; ValueError for a task that is not
        known, or not named among several.
        """
        self._require_open(writing=False)
        home = self._home
        names = [
            row.name
            for row in home.tasks.all()
            if row.takes == "arrays"
            and (self._world.source_of(row.name) or home.models.model_mark(row.name))
        ]
        return self._forecaster_of(self._one_of(names, task)).predict(batch)

    def model(self, *, task: str | None = None) -> LocalModel:
        """The model as this device last received or trained it: named arrays, copies.

        What ``predict`` or ``recommend`` uses. Personal layers are this device's own, which no
        message carries; users' vectors are no part of the model. Works offline and without
        onnxruntime. ``task``: needed where there are models of several. Raises
        :class:`NothingLearnt` before the first round, ValueError for a task that is not known, or
        not named among several.
        """
        self._require_open(writing=False)
        models = self._home.models
        names = [row.name for row in self._home.tasks.all() if models.model_mark(row.name)]
        return local_model(self._world.of_task(self._one_of(names, task), ""))

    def learner_state(self, *, task: str | None = None) -> dict[str, NDArray[Any]]:
        """What the task's learner keeps from round to round, by its own names; copies.

        Such as whom the device listened to
        (:func:`device_sdk.methods.attention.mixer.scores_of`). Holds private data: for this
        device's owner alone. Empty before the first round. ``task``: needed where several have
        trained here; ValueError without.
        """
        self._require_open(writing=False)
        models = self._home.models
        names = [row.name for row in self._home.tasks.all() if models.has_learner(row.name)]
        return models.learner(self._one_of(names, task)) or {}

    def title(self, item: str, *, task: str | None = None) -> str:
        """The catalogue's title of an item that was recommended; empty where it has none."""
        return self._recommender(task).title(item)

    @overload
    def on(
        self, event: Literal["connected"], callback: Callable[[ConnectedEvent], object]
    ) -> Callable[[], None]: ...

    @overload
    def on(
        self, event: Literal["round"], callback: Callable[[RoundEvent], object]
    ) -> Callable[[], None]: ...

    @overload
    def on(
        self, event: Literal["model"], callback: Callable[[ModelEvent], object]
    ) -> Callable[[], None]: ...

    @overload
    def on(
        self, event: Literal["problem"], callback: Callable[[ProblemEvent], object]
    ) -> Callable[[], None]: ...

    def on(self, event: EventName, callback: Callable[[Any], object]) -> Callable[[], None]:
        """Have ``callback`` called with each event to come while this device runs.

        ``event``: ``connected`` (the broker took us), ``round`` (one ended here), ``model`` (there
        is another to recommend or predict with), ``problem`` (something has been wrong for two
        seconds, or came right). Callbacks are called in order on a thread of their own, and may
        call any method of the device. One that raises is logged; one that hangs keeps events from
        the others, and nothing else. Returns a function that ends it.
        """
        self._require_open(writing=True)
        return self._callbacks.on(event, callback)

    def wait_for_model(
        self, timeout_seconds: float | None = None, *, task: str | None = None
    ) -> bool:
        """Wait until there is a model to recommend or predict with; whether there is one.

        True at once where it is here already, from an earlier run too. False when
        ``timeout_seconds`` have passed, or when the device is closed meanwhile. None: wait for
        ever. ``task``: needed where the device takes part in several; ValueError without.
        """
        self._require_open(writing=True)
        return self._observer.wait_for_model(self._taking_part(task), timeout_seconds)

    def status(self, *, task: str | None = None) -> DeviceStatus:
        """A snapshot for people and for monitoring, of one task.

        ``task``: needed where the device takes part in several; ValueError without.
        """
        self._require_open(writing=False)
        return self._background.status(self._world.of_task(self._taking_part(task), ""))

    def _taking_part(self, task: str | None) -> str:
        # What is new to this device, and may not concern its app, asks for no name yet.
        known, left = self._background.tasks(), self._has_left()
        names = [each.name for each in known if each.method and (each.takes_part or left)]
        if left:
            names = names[:1]  # it takes part in none, and they all say so
        return self._one_of(names, task)

    def _recommender(self, task: str | None) -> Recommender:
        name = self._recommending(task)
        made = Recommender(self._world.of_task(name, ""))
        return self._recommenders.setdefault(name, made)

    def _recommending(self, task: str | None) -> str:
        names = [
            row.name
            for row in self._home.tasks.all()
            if row.takes == "records" and not self._world.lacks(row.name)
        ]
        return self._one_of(names, task)

    def _one_of(self, names: Sequence[str], task: str | None) -> str:
        """``task``, where it is known; without a name the only one of ``names``, or, where there is
        none yet, the task that the device was enrolled with. Raises ValueError."""
        own = self._world.membership.task
        if task is None:
            if len(names) > 1:
                raise ValueError(
                    f"this device has several such tasks: name one, task={names[0]!r} "
                    f"({', '.join(names)})"
                )
            return names[0] if names else own
        known = {own, *self._sources, *(row.name for row in self._home.tasks.all())} - {""}
        if task not in known:
            raise ValueError(
                f"this device knows no task {task!r}; it knows {', '.join(sorted(known))}"
            )
        return task

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Stop, and give the home folder back. May be called twice; in a fork nothing happens.

        Raises :class:`HomeError` where a training in progress does not end in time.
        """
        if self._closed or not self._owner.is_here:
            return
        if not self.stop(timeout_seconds):
            # The thread still writes: the lock goes with the process, not before.
            raise HomeError("the device is still training; call close() again later")
        self._closed = True
        self._observer.close()
        self._home.close()

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _has_left(self) -> bool:
        membership = self._home.membership.load()
        return membership is not None and membership.has_left

    def __getstate__(self) -> object:
        raise TypeError(
            "a Device cannot be handed to another process: hand over its home folder, and call "
            "Device.open there (one process at a time trains a home)"
        )

    def _require_here(self) -> None:
        try:
            self._owner.require()
        except ForkedError as error:
            raise HomeError(str(error)) from None

    def _require_open(self, *, writing: bool) -> None:
        self._require_here()
        if self._closed:
            raise HomeError("this device was closed; open it again with Device.open")
        if writing and self._home.read_only:
            raise HomeError("this device was opened with read_only=True; open it without")


def _world(home: Home, **given: Any) -> DeviceWorld:
    """With what is not ``given``, or None, as :class:`DeviceWorld` has it. Raises NotEnrolled."""
    membership = home.membership.load()
    if membership is None:
        raise NotEnrolled(
            f"the device of {home.folder} has not joined a fleet: "
            f"`tessera-device join URL --home {home.folder}`, or Device.enrol"
        )
    chosen = {name: value for name, value in given.items() if value is not None}
    if "tasks" in chosen:
        chosen["tasks"] = tuple(map(_name, chosen["tasks"]))
    installed = installed_artifacts(*packaged_artifacts())
    return DeviceWorld(home, membership, installed=installed, **chosen)


def _name(task: str | None) -> str:
    """A task's name; "" for none. Raises ValueError for what cannot be one."""
    if task is not None:
        require_name("task", task)
    return task or ""


def _itself(data: LocalData) -> LocalData:
    return data


def _user_and_item(pair: object) -> tuple[str, str]:
    """The texts of an (item, user) pair, the other way round."""
    # A text of two characters could be taken apart, too.
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(
            f"{pair!r} is no (item, user) pair; expected such as record_all([('film-1', 'anna')]), "
            "or record('film-1') for an item of the device's one user"
        )
    item, user = pair
    return user, item


def _folder(home: Folder) -> Path:
    return Path(home).expanduser().absolute()
