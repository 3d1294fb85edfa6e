"""The method and its log: what was absorbed can always be made again from the store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aggregator.errors import AggregatorError, MethodFault, StateMismatch
from aggregator.events import LogEvent
from aggregator.guard import GuardedBinding, GuardedMethod
from aggregator.methods.method import Binding, ModelMismatch, RoundSummary
from aggregator.rounds.late import Ages, Sent, decode_each
from aggregator.store import TaskStore
from aggregator.store.rows import LoggedUpdate, RoundRow, VersionRow
from aggregator.store.versions import MethodCheckpoint, Ranking
from aggregator.task.file import ModelsSettings
from aggregator.task.request import ReplaceRequest
from aggregator.task.warm_start import WarmStart, item_ids
from device_sdk.artifact import Artifact
from device_sdk.methods.state import RestoreError, State
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.codec.errors import WireError

# Each version's model, kept when it is made: the newest, the best and the pinned ones.


@dataclass(frozen=True)
class VersionKeeper:
    """What a task does with its versions; see :class:`~aggregator.store.versions.Versions`.

    ``artifacts``: the task's; a model is of the last one, which is the widest. ``unix_clock`` gives
    Unix seconds.
    """

    store: TaskStore
    settings: ModelsSettings
    ranking: Ranking | None
    warm_start: WarmStart | None
    artifacts: Sequence[Artifact]
    unix_clock: Callable[[], float]

    def begin(self, method: GuardedMethod, items: int) -> str:
        """Let a new task's method begin with what the task file says; where that is from, for
        people. Raises AggregatorError."""
        if self.warm_start is None:
            return ""
        self.warm_start.begin(method, self.store, self.ranking, item_ids(self.store, items))
        LogEvent.FIRST_VERSION.log(model=self.warm_start.said)
        return self.warm_start.said

    def knows(self, version: int) -> bool:
        """Whether a version was noted."""
        return self.store.versions.find(version) is not None

    def note(
        self,
        method: GuardedMethod,
        version: int,
        round_number: int,
        devices: int,
        items: int,
        origin: str = "",
    ) -> None:
        """A version that is committed, with vectors of so many items; inside its transaction."""
        model = method.model_arrays
        row = VersionRow(
            version=version,
            round=round_number,
            closed_unix_seconds=self.unix_clock(),
            devices=devices,
            artifact=self.artifacts[-1].manifest.id if model and self.artifacts else "",
            origin=origin,
            bytes=0,
            metrics={},
            pinned=False,
            kept=model is not None,
            items=items,
        )
        versions, settings = self.store.versions, self.settings
        if origin and self.store.facts.evaluated_from == version - 1:
            # No round ended that one: it has no figures.
            self.store.facts.evaluated_from = version
            self.store.evaluations.forget(version)
        # First, so that the new model is written into the room that an old one leaves.
        last = settings.keep_last - (model is not None)
        request = self.store.fleet.tasks.find(self.store.number).request
        wanted = None if request is None else ReplaceRequest.read(request).version
        versions.prune(last, settings.keep_best, self.ranking, before=version, wanted=wanted)
        versions.add(row, model)


_MOST_NAMED = 8


class Aggregation:
    """Absorbs updates in the order of their commits. ``require_publishable`` raises for a broadcast
    that could not be sent.

    After a crash :meth:`resume` restores the last checkpoint and absorbs the log behind it: the
    same updates in the same order, so the same bits. A round without quorum leaves its updates in
    the log, and the next round begins with them: counted is counted.
    """

    def __init__(
        self,
        binding: Binding[Any],
        store: TaskStore,
        items: int,
        checkpoint_updates: int,
        require_publishable: Callable[[Broadcast], None],
        artifacts: Sequence[Artifact] = (),
        keeper: VersionKeeper | None = None,
    ) -> None:
        self._binding = GuardedBinding(binding)
        self._store = store
        self._ages = Ages(store)
        self._artifacts = tuple(artifacts)
        self._keeper = keeper
        self._checkpoint_updates = checkpoint_updates
        self._require_publishable = require_publishable
        self._built: GuardedMethod | None = None  # as soon as it is asked for
        self.items = items
        """Rows of the catalogue that updates are decoded for."""
        self.version = 0
        self.participants = 0
        """Updates absorbed since the last version."""
        self._since_checkpoint = 0
        self._last_seq = 0
        self._made: State | None = None
        """Of a version that is not committed yet: the method has opened the next round already."""
        self._opened: Broadcast | None = None
        """Of that round, until the machine opens it."""
        self._told_lowered: set[str] = set()

    @property
    def _method(self) -> GuardedMethod:
        if self._built is None:
            self._built = self._new_method(self.items)
        return self._built

    def _new_method(self, items: int) -> GuardedMethod:
        rng = np.random.default_rng([self._store.fleet.facts.seed, 0])
        try:
            return self._binding.build(items, rng, self._artifacts)
        except ValueError as error:
            if self._store.checkpoints.get("version") is not None:
                raise MethodFault("build", error) from error  # they did suit it
            name = self._binding.method_name
            raise AggregatorError(f"the task's artifacts do not suit {name}: {error}") from None

    def state(self) -> State:
        return self._method.state()

    def resume(self, open_round: RoundRow | None) -> None:
        """The state of the moment of the last commit, bit for bit, in a method that is made anew.
        Raises AggregatorError."""
        self._built = None  # whatever failed may have left anything behind
        self._restore(open_round)
        if open_round is None:
            self.participants = self._waiting()
            return
        while not self._absorb_log(open_round):
            self._built = None
            self._restore(open_round)

    def rest(self) -> None:
        """Instead of :meth:`resume`, where the method's code is not to be called: only what there
        is to see of it."""
        version = self._store.checkpoints.get("version")
        self.version = 0 if version is None else version.version
        self.participants = self._waiting()

    def _waiting(self) -> int:
        return self._store.log.waiting()

    def open_round(self, number: int) -> Broadcast:
        """Open a round. What the last one could not use has to be absorbed by ``carry_over``."""
        opened, self._opened = self._opened, None
        if opened is not None and opened.round_id == number:
            return opened
        return self._method.open_round(number)

    def carry_over(self, row: RoundRow) -> None:
        """Absorb what rounds without quorum left in the log."""
        self._last_seq, self.participants, self._since_checkpoint = 0, 0, 0
        if not self._absorb_log(row):
            self.resume(row)

    def decode(self, row: RoundRow, logged: LoggedUpdate) -> Update:
        """A logged update, as it is in the open round. Raises ``WireError``."""
        number, device_id = logged.round, logged.device_id
        update = self._binding.decode(logged.body, number, self.items, device_id.hex())
        return Sent(logged.body, device_id, number, self._ages.of(row, number)).aged(update)

    def read_each(self, row: RoundRow, sent: Sequence[Sent]) -> list[Update | WireError]:
        """The updates of many devices, who are named by the sessions they came in, as the method
        takes them; an error in the place of a bad one."""
        return self._method.take_each(decode_each(self._binding, sent, self.items))

    def gathered(self) -> int:
        """Updates that a version would be made of if the round closed now."""
        return self.participants

    @property
    def full(self) -> bool:
        """Whether the open round can take no further update."""
        return self._method.full

    def next_seq(self) -> int:
        return self._last_seq + 1

    def try_each(
        self, row: RoundRow, group: Sequence[tuple[LoggedUpdate, Update]]
    ) -> Mapping[int, str]:
        """Called before anything of a group is written; why, by ``seq``, of those that cannot be
        absorbed. Here: none, for :meth:`absorb` finds out before a receipt leaves."""
        return {}

    def keep(
        self, row: RoundRow, group: Sequence[tuple[LoggedUpdate, Update]], heard: int
    ) -> list[LoggedUpdate]:
        """Called first in the transaction that settles ``heard`` devices, with what was accepted of
        them: the updates whose bodies go into the log. Here: all."""
        return [logged for logged, _ in group]

    def gather(self, row: RoundRow, now_unix_seconds: float) -> bool:
        """The round is to be closed: take in what others have of it; whether it can be closed.
        Here: nothing, for all was absorbed as it came."""
        return True

    def absorb(
        self, row: RoundRow, group: Sequence[tuple[LoggedUpdate, Update]]
    ) -> Collection[int]:
        """Absorb a group that was committed; the ``seq`` of those that failed.

        A failure quarantines the update and holds the round; the state is made again without it.
        """
        if not group:
            return frozenset()
        try:
            self._method.absorb_each([update for _, update in group])
        except MethodFault:
            # Absorbed anew, one by one, the log says which.
            self.resume(row)
            still = {logged.seq for logged in self._store.log.after(0)}
            failed = frozenset(logged.seq for logged, _ in group if logged.seq not in still)
            if not failed:
                raise  # no update's fault
            return failed
        self._last_seq = group[-1][0].seq
        self.participants += len(group)
        self._since_checkpoint += len(group)
        if self._since_checkpoint >= self._updates_between_checkpoints:
            self._checkpoint(row)
        return frozenset()

    def close_round(self, revoked: Iterable[bytes] = ()) -> RoundSummary:
        """The method's ``close_round``; to be followed by :meth:`commit_version` or ``resume``.

        What the method would hand on of the devices ``revoked`` is dropped; what was counted stays
        in the sums. Raises where the version that was made could not be published: it must not be
        committed, since its updates are all that another attempt can be made of.
        """
        summary = self._method.close_round()
        self._tell_lowered(summary.round_id)
        for device_id in revoked:
            self._method.forget(device_id.hex())
        if summary.version != self.version:
            self._made, self._opened = self._method.next_version(summary.round_id + 1)
            self._require_publishable(self._opened)
        return summary

    def commit_version(self, summary: RoundSummary) -> None:
        """Write the new version's checkpoint and clear the log; inside a transaction."""
        made = self._method.state() if self._made is None else self._made
        self._keep_version(summary.round_id, summary.version, made)
        if summary.version != self.version:
            devices = self._store.log.devices(self.version)
            self._note(summary.version, summary.round_id, devices)
        self._made = None
        self._store.log.clear()
        self._store.shares.clear()
        self.version = summary.version
        self.participants, self._last_seq, self._since_checkpoint = 0, 0, 0

    def grow(self, items: int, last_round: int) -> None:
        """Append new items, between rounds and with an empty log; inside a transaction."""
        if self._opened is not None:
            self._restore(None)  # to before the next round's opening
        rng = np.random.default_rng([self._store.fleet.facts.seed, self.items])
        self._binding.grow(self._method, items, rng)
        self.items = items
        self.version += 1
        self._keep_version(last_round, self.version, self._method.state())
        self._note(self.version, last_round, 0, "new items")

    def _tell_lowered(self, round_number: int) -> None:
        """Say, once of each device, whose claims of samples count for less than they say."""
        lowered = self._method.lowered
        new = [each for each in lowered if each not in self._told_lowered]
        if new:
            some = [f"{each} ({lowered[each]})" for each in new[:_MOST_NAMED]]
            LogEvent.SAMPLES_LOWERED.log(
                round=round_number, devices=some, more=max(0, len(new) - _MOST_NAMED)
            )
        self._told_lowered.update(new)
        lowered.clear()

    def _keep_version(self, last_round: int, version: int, state: State) -> MethodCheckpoint:
        """Inside a transaction."""
        made = MethodCheckpoint("version", last_round, 0, version, state)
        self._store.checkpoints.put(made)
        self._store.facts.made_with = self._binding.made_with
        return made

    @property
    def goes_back(self) -> bool:
        """Whether the operator asked for an older version's model, and it waits for its turn."""
        return self._awaited() is not None

    def go_back(self, last_round: int) -> None:
        """Make the model that was asked for the next version; between rounds, with an empty log.

        In one transaction. A request for one that does not fit the task any more is dropped, where
        the operator sees it.
        """
        wanted = self._awaited()
        if wanted is None or self._keeper is None:
            return
        versions = self._store.versions
        if self._opened is not None:
            self._restore(None)  # to before the next round's opening
        try:
            self._method.adopt(versions.model(wanted))
        except (ModelMismatch, AggregatorError) as error:
            LogEvent.ROLLBACK_DROPPED.log(version=wanted, problem=error)
            with self._store.database.transaction():
                versions.drop_request(str(error))
            return
        version = self.version + 1
        with self._store.database.transaction():
            self._keep_version(last_round, version, self._method.state())
            self._note(version, last_round, 0, f"version {wanted}")
            versions.ask_for(None)
        self.version = version
        LogEvent.ROLLED_BACK.log(version=version, source=wanted)

    def _awaited(self) -> int | None:
        return None if self._keeper is None else self._store.versions.awaited()

    def _note(self, version: int, round_number: int, devices: int, origin: str = "") -> None:
        if self._keeper is not None:
            self._keeper.note(self._method, version, round_number, devices, self.items, origin)

    def _restore(self, open_round: RoundRow | None) -> None:
        self._made = self._opened = None
        version = self._store.checkpoints.get("version")
        if version is None:
            self._built = None
            origin = "" if self._keeper is None else self._keeper.begin(self._method, self.items)
            state = self._method.state()
            with self._store.database.transaction():
                version = self._keep_version(0, 0, state)
                self._note(0, 0, 0, origin)
        self.version = version.version
        partial = self._store.checkpoints.get("partial")
        self._last_seq, self.participants, self._since_checkpoint = 0, 0, 0
        try:
            self._method.restore(version.state)
            if self._store.facts.made_with != self._binding.made_with:
                self._method.settings_changed()
            self.items = self._binding.items_of(self._method)
            if self._keeper is not None and not self._keeper.knows(version.version):
                # Made by a replacement.
                with self._store.database.transaction():
                    self._note(version.version, version.round, 0, self._replaced(version.version))
            if open_round is None:
                return
            if partial is None or partial.round != open_round.round:
                self._method.open_round(open_round.round)
                return
            self._method.restore(partial.state)
            self._last_seq = partial.seq
            self.participants = sum(
                1 for logged in self._store.log.after(0) if logged.seq <= partial.seq
            )
        except RestoreError as error:
            raise StateMismatch.of(error) from None

    def _replaced(self, version: int) -> str:
        facts = self._store.facts
        if version == 0 or version not in (facts.judged_from, facts.replaced_at):
            return ""
        return "another model" if version == facts.judged_from else "other settings"

    def _absorb_log(self, row: RoundRow) -> bool:
        """Whether all of the log behind ``_last_seq`` could be absorbed."""
        for logged in self._store.log.after(self._last_seq):
            try:
                self._method.absorb(self.decode(row, logged))
            except (MethodFault, WireError) as error:
                self._quarantine(row, logged, error)
                return False
            self._last_seq = logged.seq
            self.participants += 1
            self._since_checkpoint += 1
        self._last_seq = self._store.log.last_seq()
        return True

    @property
    def _updates_between_checkpoints(self) -> int:
        """Sums stay as small as they are. A state that may hold the round's updates grows with
        them: it is written when there are half as many again, so that all of a round's checkpoints
        together are a few times the last."""
        if self._method.adds_up:
            return self._checkpoint_updates
        return max(self._checkpoint_updates, self.participants // 3)

    def _quarantine(self, row: RoundRow, logged: LoggedUpdate, error: Exception) -> None:
        why = str(error)
        LogEvent.UPDATE_QUARANTINED.log(
            error, update=logged.seq, device=logged.device_id, why=why, round=row.round
        )
        with self._store.database.transaction():
            self._store.log.quarantine(logged, row.generation, why)
            self._store.checkpoints.drop_partial()
            self._store.rounds.hold(row.round, f"update {logged.seq} is in quarantine: {why}")

    def _checkpoint(self, row: RoundRow) -> None:
        state = self._method.state()
        with self._store.database.transaction():
            self._store.checkpoints.put(
                MethodCheckpoint("partial", row.round, self._last_seq, self.version, state)
            )
        self._since_checkpoint = 0
