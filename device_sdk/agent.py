"""The background thread that takes part in rounds. It sleeps until there is something to do."""

from __future__ import annotations

import logging
import math
import re
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from device_sdk.conditions import Gate
from device_sdk.errors import CallEnded
from device_sdk.events import Live, Observer, read_live
from device_sdk.home.round_store import RoundOutcome
from device_sdk.link.broker_url import TlsFiles
from device_sdk.link.events import (
    PACKET_TOO_LARGE,
    TAKEN_OVER,
    Connected,
    ConnectRefused,
    Disconnected,
    Event,
    LinkError,
    Message,
    PublishRefused,
    Stopped,
    Subscribed,
    SubscribeRefused,
)
from device_sdk.link.link import Link
from device_sdk.methods.learner import Declined
from device_sdk.rounds import Download, MoveTo, Publish, Subscribe, Unsubscribe
from device_sdk.rounds.current_round import CurrentRound
from device_sdk.rounds.participant import Participant
from device_sdk.rounds.session import CLASH
from device_sdk.status import DeviceStatus, TaskStatus, left_out, read_status, read_tasks
from device_sdk.system.printable import in_words
from device_sdk.system.watch import Watch
from device_sdk.train.guard import ArtifactGuard, ArtifactHeld
from device_sdk.train.job import RoundTrainer, TrainingJob, load_trainer, reason_of
from device_sdk.wire.publish.report import ItemCount, Reason
from device_sdk.wire.seal.session import MAX_MESSAGE_BYTES
from device_sdk.world import DeviceWorld

if TYPE_CHECKING:
    from device_sdk.link.mirror import Mirror

_log = logging.getLogger("tessera.device")
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
# A training may take so many times what the last one took.
_SPARE = 1.5
# How the broker is reached may be changed beside a running device; it looks when a connection ends,
# too.
_LOOK_SECONDS = 60.0
_CLASH_SECONDS = 3600.0
_OFTEN, _OFTEN_SECONDS = 3, 120.0
# A step that is ended comes back within this.
_END_SECONDS = 1.0


class Downloads:
    """What is asked of the fleet's mirror, and what came of it; made when there is something."""

    def __init__(self, world: DeviceWorld, nudge: Callable[[], None]) -> None:
        self._world, self._nudge = world, nudge
        self._mirror: Mirror | None = None
        self._topics: dict[bytes, set[str]] = {}
        self._said = ""

    def ask(self, url: str, topic: str, digest: bytes) -> None:
        """Ask for the chunk that a topic retains. Raises ValueError for a URL or TLS files that
        cannot be used: the broker is asked when nothing comes."""
        is_new = digest not in self._topics
        self._topics.setdefault(digest, set()).add(topic)
        if self._mirror is None or self._mirror.url != url:
            self.stop()
            self._mirror = self._new_mirror(url)
            self._mirror.fetch(self._topics)  # with what the one before has not told of
        elif is_new:
            self._mirror.fetch([digest])

    def take(self) -> Iterator[tuple[str, bytes | None]]:
        """Topic and message of what came; None where the mirror has none."""
        if self._mirror is None:
            return
        for digest, chunk in self._mirror.take():
            for topic in self._topics.pop(digest, ()):
                yield topic, chunk
        problem = self._mirror.problem
        if problem and not self._said:
            _log.warning(
                "the fleet's mirror, its web server for chunks, cannot be used: %s; the broker is "
                "asked",
                problem,
            )
        self._said = problem

    def stop(self) -> None:
        """Ask for nothing more."""
        if self._mirror is not None:
            self._mirror.stop()

    def _new_mirror(self, url: str) -> Mirror:
        # Here, since most devices have none: it loads an HTTP client.
        from device_sdk.link.mirror import Mirror

        tls = self._world.membership.way.tls
        return Mirror(
            url,
            most_bytes=MAX_MESSAGE_BYTES,
            clock=self._world.clock,
            tls=None if tls is None else TlsFiles(tls.ca_file).context(),
            proxy=self._world.link_settings.proxy,
            on_result=self._nudge,
        )


class Agent:
    """Runs a :class:`Participant` on a link, and its rounds' training, in one daemon thread.

    The process may end at any moment, by SIGKILL too: what matters is committed before it is sent.
    An agent runs once; make a new one to start again. ``trainer``: the task's method's, if None.
    ``leaves``: it only tells the aggregator that this device leaves, and then sets ``left``.
    ``ended`` is called last, on its thread.
    """

    def __init__(
        self,
        world: DeviceWorld,
        trainer: RoundTrainer | None = None,
        observer: Observer | None = None,
        *,
        leaves: bool = False,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        # Root and placement may be others than when the device was opened.
        world = replace(world, membership=world.home.membership.load() or world.membership)
        training_rng, jitter, link_rng = world.rng.spawn(3)
        self._watch = Watch()
        training_world = replace(world, rng=training_rng, watch=self._watch)
        self._trainer, self._observer, self._ended = trainer, observer, ended
        self._gates: dict[str, Gate] = {}
        self._only_when, self._ask_seconds = world.options.only_when, world.pace.ask_seconds
        self._rounds = world.home.rounds
        self._trainer_of = cache(
            lambda task, cohort, method: load_trainer(training_world.of_task(task, cohort), method)
        )
        self._clock = world.clock
        self.participant = Participant(replace(world, rng=jitter), leaves=leaves)
        self.left = threading.Event()
        self._membership = membership = world.membership
        self._stored, self._look_seconds = world.home.membership, world.clock() + _LOOK_SECONDS
        self._link = Link(
            membership.broker(self.participant.cell.here),
            rng=link_rng,
            clock=world.clock,
            client_id=membership.grant.handle.hex(),
            settings=world.link_settings,
        )
        self._downloads = Downloads(world, self._link.nudge)
        self._waiting: deque[Callable[[], None]] = deque([self.participant.start])
        self._stopping = threading.Event()
        self._guard = ArtifactGuard(
            training_world, lambda: self.participant.sessions.time.unix_seconds()
        )
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._failures: Counter[str] = Counter()
        self._failed = FailedTrainings()
        self._refused: dict[str, str] = {}
        self._taken_over_seconds = -math.inf
        self._closed: deque[float] = deque(maxlen=_OFTEN)
        self.problem = ""
        """The last thing that went wrong with the device as a whole, and has not come right since;
        empty for none."""
        self._thread = threading.Thread(target=self._run, name="tessera-device", daemon=True)

    def broker(self) -> str:
        """The one that it is at, or tries to reach; without user and password."""
        return str(self._membership.broker(self.participant.cell.here))

    @property
    def is_here(self) -> bool:
        """Whether this is the caller's thread."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Start the thread."""
        self._link.start()
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop after the work in hand; whether the thread ended within ``timeout_seconds``.

        A training that is not over just before that is ended: its round is as if it had not begun.
        """
        self._stopping.set()
        until = self._clock() + timeout_seconds
        # The link's last event wakes the thread; a training in progress is finished first.
        self._link.stop(flush_seconds=min(1.0, timeout_seconds), timeout_seconds=timeout_seconds)
        if self._thread.ident is None:
            return True
        last_seconds = min(_END_SECONDS, timeout_seconds / 2)
        self._thread.join(max(0.0, until - last_seconds - self._clock()))
        if self._thread.is_alive():
            self._watch.end("stopped")
            self._thread.join(last_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._waiting or not self._stopping.is_set():
            work = self._waiting.popleft() if self._waiting else self._turn
            try:
                work()
            except BaseException as error:
                # No failure of ours (a full disk, say) may end the thread, nor may an app's or a
                # method's code, by sys.exit() say: signals come to the main thread alone.
                name = type(error).__name__
                if self._failures[name] == 0:
                    _log.exception("the device's thread failed and goes on")
                self._failures[name] += 1
                self.problem = in_words(error)
                self._stopping.wait(self._pause_seconds)
                self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
            else:
                self._pause_seconds = _FIRST_PAUSE_SECONDS
            if self._observer is not None:
                self._observer.look(self.live(), self.broker)
        self._downloads.stop()
        if self._observer is not None:
            self._observer.stopped()
        self._ended()

    def _turn(self) -> None:
        self._act()
        if self._clock() >= self._look_seconds:
            self._look_at_way()
        self._asks_again_seconds = math.inf
        round_ = self.participant.turn(self._may_begin)
        if round_ is not None:
            self._work(round_)
        else:
            next_seconds = self.participant.next_seconds()
            next_seconds = min(next_seconds, self._asks_again_seconds, self._look_seconds)
            if self._observer is not None:
                next_seconds = min(next_seconds, self._observer.next_seconds)
            wait_seconds = next_seconds - self._clock()
            timeout_seconds = None if wait_seconds == math.inf else max(0.0, wait_seconds)
            events = self._link.events(timeout_seconds=timeout_seconds)
            # Each apart: one that fails must not take the others with it.
            self._waiting.extend(partial(self._take, event) for event in events)
            for topic, chunk in self._downloads.take():
                if chunk is None:
                    self._waiting.append(partial(self.participant.not_mirrored, topic))
                else:
                    self._waiting.append(
                        partial(self.participant.message, topic, chunk, retained=True)
                    )
            self._waiting.append(self.participant.tick)

    def _act(self) -> None:
        actions = self.participant.actions
        while actions:
            match actions.popleft():
                case Publish(topic, payload):
                    self.participant.budget.count(len(payload))
                    try:
                        self._link.publish(topic, payload)
                    except LinkError as error:
                        self.problem = str(error)  # sent again like anything without an answer
                case Subscribe(topic_filter, optional):
                    self._link.subscribe(topic_filter, optional=optional)
                case Unsubscribe(topic_filter):
                    self._link.unsubscribe(topic_filter)
                case MoveTo(cell):
                    self._membership = self._stored.load() or self._membership
                    self._link.redirect(self._membership.broker(cell))
                case Download(mirror, topic, digest):
                    self._downloads.ask(mirror, topic, digest)

    def _look_at_way(self) -> None:
        """Go by how the broker is to be reached now, where that was changed."""
        self._look_seconds = self._clock() + _LOOK_SECONDS
        known, now = self._membership, self._stored.load()
        if now is not None and now.way != known.way:
            self._membership = now
            self.participant.cell.way_given()
            self._link.redirect(now.broker(self.participant.cell.here))

    def _take(self, event: Event) -> None:
        match event:
            case Message(topic, payload, retained):
                self.participant.message(topic, payload, retained=retained)
                self._link.contested = self.participant.sessions.clash
                if self.participant.farewell is not None and self.participant.farewell.done:
                    self.left.set()
            case Connected(_, limits):
                self.problem = ""
                self.participant.connected(True, limits.maximum_packet_bytes)
            case Disconnected(reason, detail, _, code):
                self.problem = f"no connection to {self.broker()} ({reason}): {detail}"
                if code == TAKEN_OVER:
                    if self._taken_over_seconds == -math.inf:
                        _log.warning("%s: %s", detail, CLASH)
                    self._taken_over_seconds = self._clock()
                    self.participant.sessions.taken_over()
                elif reason == "closed" and self._is_closed_often():
                    self.participant.sessions.taken_over()  # not every broker says so
                self.participant.connected(False)
                self._look_at_way()
            case ConnectRefused(_, detail):
                self.problem = f"{self.broker()} refused the connection: {detail}"
                self.participant.connected(False)
                self._look_at_way()
            case SubscribeRefused(topic_filter, _, detail):
                self.problem = f"the broker refused the subscription to {topic_filter}: {detail}"
                self._refused[topic_filter] = self.problem
            case Subscribed(topic_filter):
                if self._refused.pop(topic_filter, None) == self.problem:
                    self.problem = ""
            case PublishRefused(topic, code, detail):
                if code == PACKET_TOO_LARGE:
                    self.participant.sender.too_large()
                self.problem = f"the broker refused a message to {topic}: {detail}"
            case Stopped():
                self._stopping.set()

    def _may_begin(self, round_: CurrentRound) -> bool:
        """Whether to train now. A round that the app keeps back until it is too late ends here."""
        job = round_.question or round_.job
        assert job is not None
        if self._only_when is None or job.manifest.threshold == 0:
            return True
        gate = self._gates.get(round_.task)
        if gate is None:
            gate = self._gates[round_.task] = Gate(self._only_when, self._ask_seconds, self._clock)
        if gate.opens_for(job):
            round_.kept_back = ""
            return True
        round_.kept_back = gate.problem or "only_when said no"
        if self._clock() < self._latest_seconds(job):
            self._asks_again_seconds = min(self._asks_again_seconds, gate.next_seconds)
            return False
        why = gate.problem or "only_when said no for as long as it could be trained in time"
        round_.ended(job, RoundOutcome.DECLINED, f"not-now: {why}", Reason.NOT_NOW)
        return False

    def _latest_seconds(self, job: TrainingJob) -> float:
        """By the clock, when a training must begin to end before the deadline."""
        took = self._rounds.trained_seconds(job.manifest.task, job.manifest.generation)
        needs = job.terms.train_seconds if took is None else _SPARE * took
        return self.participant.rounds[job.manifest.task].deadline_seconds - needs

    def live(self) -> Live:
        """What only this thread knows."""
        participant = self.participant
        rounds, gates = dict(participant.rounds), dict(self._gates)
        manifests = {name: each.manifest for name, each in rounds.items()}
        problems = {
            name: self._failed.problem(name) or (gates[name].problem if name in gates else "")
            for name in rounds
        }
        # What the broker's word shows, for a while: mostly the other one has the connection.
        recent = self._clock() - self._taken_over_seconds < _CLASH_SECONDS
        clashes = recent or participant.sessions.clash
        return Live(
            self._link.limits is not None,
            participant.sessions.is_open,
            {name: each.round for name, each in manifests.items() if each is not None},
            (CLASH if clashes else "") or self.problem or participant.problem,
            {name: problem for name, problem in problems.items() if problem},
        )

    def _is_closed_often(self) -> bool:
        """Whether the broker ended connections so often of late, without a word."""
        self._closed.append(self._clock())
        often = len(self._closed) == _OFTEN and self._closed[-1] - self._closed[0] < _OFTEN_SECONDS
        if often:
            self._closed.clear()
        return often

    def wake(self) -> None:
        """The app has changed something: look what there is to do now. From any thread."""
        self._link.nudge()

    def _work(self, round_: CurrentRound) -> None:
        """What a round asks for; where it fails, the round ends without an update."""
        job = round_.question or round_.job
        assert job is not None
        asks, rests = round_.question is not None, job.manifest.threshold == 0
        items: ItemCount | None = None
        if not asks and not rests:
            self._waiting.append(self.participant.tick)
        try:
            trainer = self._trainer or self._trainer_of(
                round_.task, round_.cohort, job.terms.method
            )
            with self._guard.using(job) as allowed:
                if asks:
                    wanted = trainer.wants(allowed)
                elif rests:
                    adopted = trainer.adopt(allowed)
                else:
                    result = trainer.train(allowed)
            if asks:
                round_.wanted(wanted)
                return
            if rests:
                round_.read(job, adopted)
                return
        except ArtifactHeld as held:
            outcome, detail, reason = RoundOutcome.DECLINED, str(held), held.reason
            self._failed.note(round_.task, self._called(round_, job), detail, reason)
        except Declined as declined:
            outcome, detail, reason = RoundOutcome.DECLINED, str(declined), declined.reason
            items = declined.items
        except BaseException as error:
            if self._watch.ended == "stopped" and isinstance(error, CallEnded):
                round_.drop()  # as a crash would leave it: what is still open is trained again
                return
            outcome, detail = RoundOutcome.FAILED, in_words(error)
            reason = reason_of(error)
            self._failed.note(round_.task, self._called(round_, job), detail, reason)
        else:
            try:
                round_.trained(job, result)
            except (sqlite3.OperationalError, OSError):
                raise  # the disk's: it is trained again once there is room
            except Exception as error:
                # Of what no home can hold another training would be no better.
                outcome, detail, reason = RoundOutcome.FAILED, in_words(error), reason_of(error)
                self._failed.note(round_.task, self._called(round_, job), detail, reason)
            else:
                self._failed.forget(round_.task)
                self.problem = ""  # network and disk did their part
                return
        round_.ended(job, outcome, detail, reason, items)

    def _called(self, round_: CurrentRound, job: TrainingJob) -> str:
        """The round, for people."""
        several = len(self.participant.rounds) > 1
        return f"round {job.manifest.round}{f' of {round_.task}' * several}"


# Trainings that fail round after round: told in full once, then in short.

_NUMBERS = re.compile(r"[-+]?\b(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)\b")


class _Failure(NamedTuple):
    round: str
    detail: str

    def is_like(self, detail: str) -> bool:
        """Whether the words are the same; numbers in them, such as a loss, do not count."""
        return _NUMBERS.sub("", self.detail) == _NUMBERS.sub("", detail)


class FailedTrainings:
    """Of each task whose last training failed, the first of the failures that were all alike."""

    def __init__(self) -> None:
        self._first: dict[str, _Failure] = {}

    def note(self, task: str, round_: str, detail: str, reason: Reason) -> None:
        """A training failed: log it. ``round_``: which one, for people."""
        first = self._first.get(task)
        if first is not None and first.is_like(detail):
            _log.warning("%s ended as %s did: %s", round_, first.round, reason.value)
            return
        _log.warning("%s ended without an update: %s", round_, detail)
        self._first[task] = _Failure(round_, detail)

    def forget(self, task: str) -> None:
        """A training went well."""
        self._first.pop(task, None)

    def problem(self, task: str) -> str:
        """For people; empty where the last training went well."""
        first = self._first.get(task)
        return "" if first is None else f"{first.round}: {first.detail}"


# Learning in the background: an agent is made at each start, for an agent runs once.


class Background:
    """Starts and stops taking part in rounds, from any thread."""

    def __init__(self, world: DeviceWorld, observer: Observer) -> None:
        self._world, self._observer = world, observer
        self._agent: Agent | None = None
        self._wanted = self._paused = False
        self._lock, self._pauses = threading.Lock(), threading.Lock()

    def start(self) -> None:
        """Start a thread, once one that is told to stop has ended. Does nothing if one runs."""
        with self._lock:
            self._wanted = True
            self._go_on()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop after the work in hand; whether the thread ended within ``timeout_seconds``."""
        with self._lock:
            agent = self._agent_of_others()
            self._wanted = False
        return agent is None or agent.stop(timeout_seconds)

    @contextmanager
    def paused(self, timeout_seconds: float) -> Iterator[bool]:
        """Within, nothing runs, whatever :meth:`start` says meanwhile; then it goes on as wanted.

        Whether the thread ended within ``timeout_seconds``: where it did not, it goes on too.
        """
        with self._lock:
            agent = self._agent_of_others()
        with self._pauses:
            with self._lock:
                self._paused, agent = True, self._agent
            try:
                yield agent is None or agent.stop(timeout_seconds)
            finally:
                with self._lock:
                    self._paused = False
                    self._go_on()

    @property
    def running(self) -> bool:
        """Whether a thread takes part in rounds, or does its last work."""
        return self._agent is not None

    def _agent_of_others(self) -> Agent | None:
        if self._agent is not None and self._agent.is_here:
            raise RuntimeError(
                "stop(), close(), forget() and leave() wait for the device's own thread, and were "
                "called on it, in only_when or where data are given: call them on another thread"
            )
        return self._agent

    def _go_on(self) -> None:
        if self._agent is None and self._wanted and not self._paused:
            agent = Agent(self._world, observer=self._observer, ended=self._ended)
            agent.start()
            self._agent = agent

    def _ended(self) -> None:
        with self._lock:
            self._agent = None
            self._go_on()

    def wake(self) -> None:
        """See :meth:`Agent.wake`; nothing where no thread runs."""
        agent = self._agent
        if agent is not None:
            agent.wake()

    def leave(self, timeout_seconds: float) -> str:
        """Tell the aggregator that this device leaves, in the place of taking part; why it has not
        answered in time, or nothing where it has."""
        agent = Agent(self._world, leaves=True)
        agent.start()
        try:
            if agent.left.wait(timeout_seconds):
                return ""
            return agent.problem or agent.participant.problem or "the aggregator is silent"
        finally:
            agent.stop(_FIRST_PAUSE_SECONDS)

    def status(self, world: DeviceWorld) -> DeviceStatus:
        """What the home folder holds of ``world``'s task, and what the thread knows where one
        runs."""
        agent = self._agent
        # In this order: a round that ends meanwhile is in hand, or concluded in the home.
        live, status = self._live(agent), read_status(world)
        if live is not None:
            status = replace(
                status,
                running=True,
                connected=live.connected,
                session=live.session,
                working_on=live.working_on.get(status.task),
                problem=live.problem_of(status.task),
            )
        if agent is None:
            return status
        return replace(
            status,
            broker=agent.broker(),
            time_unix_seconds=agent.participant.sessions.time.unix_seconds(),
            sent_bytes=agent.participant.sender.sent_bytes,
            refused=agent.participant.refusals.counts(),
        )

    def tasks(self) -> tuple[TaskStatus, ...]:
        """All tasks that the home has heard of, and which of their rounds are in hand."""
        agent = self._agent
        live = self._live(agent)
        if agent is None and live is not None:
            tasks = read_tasks(self._world, live.left_out)  # as the other process has it
        else:
            tasks = read_tasks(self._world, left_out(self._world))
        working_on = {} if live is None else live.working_on
        return tuple(replace(each, working_on=working_on.get(each.name)) for each in tasks)

    def _live(self, agent: Agent | None) -> Live | None:
        """Of this process's thread, or of another process; None where none runs."""
        if agent is not None:
            return agent.live()
        return read_live(self._world.home.folder) if self._world.home.read_only else None
