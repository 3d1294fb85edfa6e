"""The device: one class for an app that embeds Tessera."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.agent import Background
from device_sdk.enrol import FleetAddress, enrol
from device_sdk.errors import HomeError, LeaveUnanswered, NotEnrolled
from device_sdk.factorisation import packaged_artifact
from device_sdk.forecaster import Forecaster
from device_sdk.home.forget import forget
from device_sdk.home.home import Home
from device_sdk.link.broker_url import TlsFiles
from device_sdk.link.settings import LinkSettings
from device_sdk.local_data import DataSource, LocalData
from device_sdk.local_model import LocalModel, local_model
from device_sdk.recommender import Recommender
from device_sdk.status import DeviceStatus
from device_sdk.system.clock import Clock, awake_clock
from device_sdk.world import DeviceWorld, Pace, TrainingOptions, installed_artifacts

Folder = str | os.PathLike[str]
_FORGET_SECONDS = 30.0


class Device:
    """A member of a fleet: records, learns in the background, recommends or predicts.

    Made by :meth:`enrol` (once) or :meth:`open` (afterwards). A context manager: leaving it stops
    and closes. All methods may be called from any thread, and none waits for the network but
    :meth:`enrol`. Nothing that is recorded leaves the device; a round sends one sealed update.
    """

    def __init__(self, world: DeviceWorld, data: LocalData | DataSource | None = None) -> None:
        """For :meth:`open`, and for tests that bring a world of their own. Takes its home over."""
        self._world = world = replace(world, source=lambda: self._source)
        self._home = world.home
        self._recommender = Recommender(world)
        self._forecaster = Forecaster(world)
        self._background = Background(world)
        self._source: DataSource | None = None
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
        tls: TlsFiles | None = None,
        prefix: str = "tessera",
        task: str = "default",
        cohort: str = "all",
        timeout_seconds: float = 30.0,
        options: TrainingOptions | None = None,
        pace: Pace | None = None,
        link_settings: LinkSettings | None = None,
        work_clock: Clock | None = None,
        data: LocalData | DataSource | None = None,
    ) -> Device:
        """Join a fleet with a code from ``tessera-aggregator invite``, and open the device.

        Args:
            url: ``mqtt://host``, ``mqtts://host:8883``, ``mqtts://user:password@host``.
            code: used up by the first device that sends it.
            home: a folder of this device's own, made if missing, readable by its owner only.
            tls: CA file and client certificate; the system's authorities without.
            prefix, task, cohort: as `invite` printed them; mostly these defaults.
            timeout_seconds: how long to wait for broker and aggregator.
            options, pace, link_settings, work_clock, data: as in :meth:`open`.

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
                FleetAddress(url, tls, prefix, task, cohort),
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
        options: TrainingOptions | None = None,
        pace: Pace | None = None,
        link_settings: LinkSettings | None = None,
        work_clock: Clock | None = None,
        data: LocalData | DataSource | None = None,
    ) -> Device:
        """Open an enrolled device. Touches no network.

        Args:
            home: the folder that was enrolled.
            read_only: only ``recommend``, ``predict`` and ``status``; works beside a process that
                runs the device.
            options: a fixed k, emulated slowness, privacy: :class:`TrainingOptions`.
            pace: waits.
            link_settings: the connection's limits and times.
            work_clock: times the training; the machine's own when None.
            data: see :meth:`provide`.

        Raises :class:`NotEnrolled`, :class:`HomeLocked` (another process has it open),
        :class:`HomeBroken`.
        """
        opened = Home(_folder(home), read_only=read_only)
        try:
            return cls(
                _world(
                    opened,
                    options=options,
                    pace=pace,
                    link_settings=link_settings,
                    work_clock=work_clock,
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

    def record(self, item: str, user: str = "default") -> bool:
        """Note that a local user touched an item; whether that was news. On disk on return.

        ``item`` is the app's own id. One that the task's catalogue does not know is kept and takes
        part once the catalogue does. Raises ValueError for an empty or overlong text.
        """
        return self.record_all([(item, user)]) == 1

    def record_all(self, pairs: Iterable[tuple[str, str]]) -> int:
        """:meth:`record` for many (item, user) pairs in one commit; how many were news.

        Raises ValueError for what is no pair of texts; nothing is recorded then.
        """
        self._require_open(writing=True)
        return self._home.interactions.add(_user_and_item(pair) for pair in pairs)

    def provide(self, data: LocalData | DataSource) -> None:
        """Give the samples that tasks on arrays train on; they stay on this device.

        ``data``: the samples, or a function that gives them, called on the device's thread at the
        start of each round. May be called at any moment, and again with other data. Not kept in the
        home folder: an app gives its data each time it opens the device.
        """
        self._source = data if callable(data) else lambda: data

    def start(self) -> None:
        """Take part in rounds from now on, in a background thread. Does nothing if it runs.

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

        A training in progress is finished first. What waits in the outbox is sent after the next
        :meth:`start`, in this process or another.
        """
        return self._background.stop(timeout_seconds)

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
        was_running = self._background.running
        if not self.stop(timeout_seconds):
            raise HomeError("the device is still training; call leave() again later")
        problem = self._background.leave(timeout_seconds)
        if problem:
            if was_running:
                self.start()
            raise LeaveUnanswered(
                f"the aggregator did not confirm within {timeout_seconds:g} s ({problem}): call "
                "leave() again, or ask its operator to revoke this device"
            )

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
        was_running = self._background.running
        if not self.stop(_FORGET_SECONDS):
            raise HomeError("the device is still training; call forget() again later")
        try:
            return forget(self._home, user, item)
        finally:
            self._recommender.reload()
            if was_running:
                self.start()

    def recommend(self, count: int = 10, user: str = "default") -> list[tuple[str, float]]:
        """The ``count`` best items that the user has not touched, as (item, score), best first.

        Works offline, from the last round that this device trained, with all columns of the model
        whatever its own k is. Raises :class:`UnknownUser`, :class:`NothingLearnt`, ValueError for a
        negative count.
        """
        self._require_open(writing=False)
        return self._recommender.recommend(count, user)

    def predict(self, batch: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """What the task's model, as this device last trained it, says of a batch.

        ``batch`` holds the artifact's inputs by name, a row for each sample; the answer its outputs
        by name. Works offline, and while a round is trained. Raises :class:`NothingLearnt` before
        the first round, and for tasks that recommend; BatchError for a batch that does not fit.
        """
        self._require_open(writing=False)
        return self._forecaster.predict(batch)

    def model(self) -> LocalModel:
        """The model as this device last received or trained it: named arrays, copies.

        What ``predict`` or ``recommend`` uses. Personal layers are this device's own, which no
        message carries; users' vectors are no part of the model. Works offline and without
        onnxruntime. Raises :class:`NothingLearnt` before the first round.
        """
        self._require_open(writing=False)
        return local_model(self._world)

    def learner_state(self) -> dict[str, NDArray[Any]]:
        """What the task's learner keeps from round to round, by its own names; copies.

        Such as whom the device listened to
        (:func:`device_sdk.methods.attention.mixer.scores_of`). Holds private data: for this
        device's owner alone. Empty before the first round.
        """
        self._require_open(writing=False)
        return self._home.models.learner(self._world.membership.task) or {}

    def title(self, item: str) -> str:
        """The catalogue's title of an item that was recommended; empty where it has none."""
        return self._recommender.title(item)

    def status(self) -> DeviceStatus:
        """A snapshot for people and for monitoring."""
        self._require_open(writing=False)
        return self._background.status()

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Stop, and give the home folder back. May be called twice.

        Raises :class:`HomeError` where a training in progress does not end in time.
        """
        if self._closed:
            return
        if not self.stop(timeout_seconds):
            # The thread still writes: the lock goes with the process, not before.
            raise HomeError("the device is still training; call close() again later")
        self._closed = True
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

    def _require_open(self, *, writing: bool) -> None:
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
    installed = installed_artifacts(packaged_artifact())
    return DeviceWorld(home, membership, installed=installed, **chosen)


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
