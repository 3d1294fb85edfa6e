"""Workers as Ray's actors: placed, and started again, by Ray."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.cluster.joined_ray import JoinedRay, first_line, require_private_folder
from aggregator.cluster.orders import KeyMaterial, Orders, Post, ServedTask
from aggregator.cluster.worker import Worker, WorkerStatus, run_on_thread
from aggregator.errors import AggregatorError
from aggregator.events import LogEvent
from aggregator.logs import USUAL_LOG, LogSettings
from aggregator.serve.assembly import World
from aggregator.store.cluster import Deposed
from aggregator.store.rows import ShareRow
from device_sdk.system.clock import awake_clock

_LONG_SECONDS = 30.0
_FROZEN_SECONDS = 15.0
_SHARES_SECONDS = 5.0
_STARTING_SECONDS = 120.0
_AGAIN_SECONDS = 5.0


class WorkerActor:
    """A worker in a process of Ray's. When that is killed, Ray starts another, which knows nothing:
    it takes up its slot with the orders that it is told next, and what the store has."""

    def __init__(self, post: Post, log: LogSettings) -> None:
        number = post.slot.number
        line = f"worker {number}: %(levelname)s %(task)s%(message)s"
        log.start(logging.StreamHandler(sys.stderr), line, worker=number)
        import ray  # here alone: the coordinator's process imports it once its settings are set

        world = World(awake_clock, time.time, np.random.default_rng(), os.urandom)
        self._post = post
        # Before it is told any key: on each machine Ray has a folder of its own.
        require_private_folder(Path(ray.get_runtime_context().get_temp_dir()))
        self._worker = Worker(post, world)
        self._done = threading.Event()
        self._stopping = run_on_thread(self._worker, self._ended)

    def follow(
        self,
        revision: int,
        incarnation: bytes,
        keys: tuple[KeyMaterial, ...],
        tasks: tuple[ServedTask, ...],
        absent: tuple[str, ...],
    ) -> WorkerStatus:
        """Keys come by themselves: an argument this small travels in the call, and lies in no
        object store."""
        self._worker.follow(revision, Orders(incarnation, keys, tasks, absent))
        return self._worker.status()

    def status(self) -> WorkerStatus:
        return self._worker.status()

    def serves(self, post: Post) -> bool:
        """Whether it was started for this post, by the same version."""
        return post == self._post

    def share(self, epoch: int, task: int, round_number: int, commit: int) -> bytes | None:
        """See :meth:`Worker.share`."""
        return self._worker.share(epoch, task, round_number, commit)

    def stop(self) -> None:
        """Commit, answer, and end."""
        self._stopping.set()
        self._done.wait(_LONG_SECONDS)

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            LogEvent.WORKER_ENDED.log(problem=error)
        self._done.set()
        if error is not None:
            # One that was deposed has a successor. Of all other errors Ray is to start another.
            sys.stderr.flush()
            os._exit(0 if isinstance(error, Deposed) else 1)


@dataclass
class _Hired:
    """An actor, and what is known of it."""

    post: Post
    actor: Any
    known: bool = False
    """Whether it said that it is for this post: a coordinator before us may have left it."""
    again_seconds: float = 0.0
    """Not before is another one hired in its place."""
    asked: Any = None
    asked_seconds: float = 0.0
    status: WorkerStatus | None = None
    said: str = ""


class RayRuntime:
    """Starts, or finds, an actor for each post; named, so that another coordinator finds them too.

    ``joined``: the Ray cluster that we are in. Its workers outlive us, those of a Ray of our own do
    not. ``log``: what they log. Raises AggregatorError where it is not the one any more that we
    joined.
    """

    def __init__(
        self, posts: Sequence[Post], joined: JoinedRay, log: LogSettings = USUAL_LOG
    ) -> None:
        self._joined, self._ray, self._log = joined, joined.ray, log
        self._namespace = f"tessera-{posts[0].root_fingerprint.hex()}"
        self._class = self._ray.remote(WorkerActor)
        try:
            self._dismiss_others(posts)
            self._hired = [self._hire(post) for post in posts]
        except self._ray.exceptions.RayError as error:
            raise AggregatorError(
                "the Ray cluster was lost before its workers could be started "
                f"({first_line(error)}): if its head was restarted in the meantime, restart this "
                "process as well"
            ) from None

    def post(self, posts: Sequence[Post]) -> None:
        """See :class:`~aggregator.cluster.coordinator.Runtime`: an actor is not asked, which may
        hang."""
        for each, post in zip(self._hired, posts, strict=True):
            if each.post != post:
                each.post, each.again_seconds, each.asked = post, 0.0, None
                self._replace(each, "is to be of other settings")

    def tend(self, revision: int, orders: Orders) -> None:
        """See :class:`~aggregator.cluster.coordinator.Runtime`."""
        for each in self._hired:
            self._hear(each)
            if each.asked is not None:
                continue
            each.asked_seconds = time.monotonic()
            if not each.known:
                each.asked = each.actor.serves.remote(each.post)
            elif each.status is None or each.status.revision != revision:
                each.asked = each.actor.follow.remote(
                    revision, orders.incarnation, orders.keys, orders.tasks, orders.absent
                )
            else:
                each.asked = each.actor.status.remote()

    def statuses(self) -> list[WorkerStatus]:
        """What workers said last."""
        return [each.status for each in self._hired if each.status is not None]

    def shares(self, task: int, rows: Sequence[ShareRow]) -> list[bytes | None]:
        """See :class:`~aggregator.cluster.coordinator.Runtime`: through Ray's object store."""
        ray = self._ray
        actors = {each.post.slot.number: each.actor for each in self._hired}
        asked = [
            actors[row.slot].share.remote(row.epoch, task, row.round, row.commits)
            if row.slot in actors
            else ray.put(None)
            for row in rows
        ]
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=_SHARES_SECONDS)
        found: list[bytes | None] = []
        for each in asked:
            try:
                found.append(ray.get(each) if each in done else None)
            except ray.exceptions.RayError:
                found.append(None)  # a worker that is gone: the store has it
        return found

    def stop(self) -> None:
        """Let workers commit and answer what they have, and end them; a Ray of our own, too."""
        ray = self._ray
        ending = [each.actor.stop.remote() for each in self._hired]
        ray.wait(ending, num_returns=len(ending), timeout=_LONG_SECONDS)
        for each in self._hired:
            ray.kill(each.actor, no_restart=True)
        self.leave()

    def leave(self) -> None:
        """Without a word to workers: another coordinator takes them over."""
        self._joined.leave()

    def _hire(self, post: Post) -> _Hired:
        options: dict[str, Any] = {
            "name": _name(post),
            "namespace": self._namespace,
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": 4,
            "num_cpus": 1,
            "get_if_exists": True,
        }
        if not self._joined.own:
            options["lifetime"] = "detached"
        return _Hired(post, self._class.options(**options).remote(post, self._log))

    def _dismiss_others(self, posts: Sequence[Post]) -> None:
        """End the workers that a coordinator before us left beyond those that there are to be."""
        ray = self._ray
        wanted = {_name(post) for post in posts}
        for each in ray.util.list_named_actors(all_namespaces=True):
            if each["namespace"] == self._namespace and each["name"] not in wanted:
                with suppress(ValueError):  # it ended meanwhile
                    ray.kill(ray.get_actor(**each), no_restart=True)

    def _hear(self, each: _Hired) -> None:
        """Take an answer that has come; replace who does not answer."""
        ray = self._ray
        if each.asked is None:
            return
        done, _ = ray.wait([each.asked], timeout=0)
        if not done:
            silent_seconds = time.monotonic() - each.asked_seconds
            if silent_seconds > (_FROZEN_SECONDS if each.status is not None else _STARTING_SECONDS):
                each.asked = None
                self._replace(each, "does not answer")
            return
        asked, each.asked = each.asked, None
        try:
            found = ray.get(asked)
            if each.known:
                each.status, each.said = found, ""
            elif found:
                each.known = True
            else:
                self._replace(each, "is of other settings, or of another version")
        except ray.exceptions.ActorUnavailableError:
            self._say(each, "is gone, and is started again")
        except ray.exceptions.ActorDiedError as error:
            self._replace(each, f"is gone: {first_line(error)}")
        except ray.exceptions.RayTaskError as error:
            if each.known:
                self._say(each, f"cannot be asked: {first_line(error)}")
            else:
                self._replace(each, f"does not say what it serves: {first_line(error)}")
        except ray.exceptions.RayError as error:
            self._say(each, f"cannot be asked: {first_line(error)}")

    def _replace(self, each: _Hired, why: str) -> None:
        """Another one in the place of one that Ray does not start again. The store keeps the one
        before from writing, whether it is gone or not."""
        self._say(each, why)
        now = time.monotonic()
        if now >= each.again_seconds:
            self._ray.kill(each.actor, no_restart=True)
            each.actor, each.again_seconds = self._hire(each.post).actor, now + _AGAIN_SECONDS
            each.known = False

    def _say(self, each: _Hired, what: str) -> None:
        each.status = None
        if each.said != what:
            each.said = what
            LogEvent.WORKER_LOST.log(worker=each.post.slot.number, problem=what)


def _name(post: Post) -> str:
    """Of an actor, within the fleet's namespace."""
    return f"worker-{post.slot.number}"
