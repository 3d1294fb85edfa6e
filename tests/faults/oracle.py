"""What must be true at the end of a run, worked out from the devices' side and the commits."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import Binding, Method
from aggregator.store.database import Database
from aggregator.store.rows import NOTED
from aggregator.store.versions import unpack_state
from tests.fakes.waiting import PATIENCE_SECONDS
from tests.faults.fleet_home import FleetHome
from tests.faults.known import (
    CHECK_UNIT,
    ITEMS,
    KnownBinding,
    known_binding,
    known_body,
    known_check_value,
)
from tests.faults.known_ladder import LadderBinding, ladder_body


class Mismatch(AssertionError):
    """The promise was broken."""


@dataclass(frozen=True)
class Judgement:
    """Figures of a run that kept its promise, or (``lost``, ``twice``) did not."""

    trained: int
    receipted: dict[str, int]
    waiting: int
    lost: int
    twice: int
    rounds: int
    versions: int
    counted_in: dict[int, int] = field(default_factory=dict)
    """Updates by the round that they are of."""
    opened_unix_seconds: dict[int, float] = field(default_factory=dict)
    """When each round opened, by the store's clock."""
    by_slot: dict[int, int] = field(default_factory=dict)
    """Updates by the slot whose workers took them in."""
    late: int = 0
    """Updates that entered a later round than their own."""


@dataclass(frozen=True)
class _Part:
    place: int
    generation: int
    round: int
    version: int
    verdict: str | None
    reason: str

    @property
    def key(self) -> _Key:
        return self.place, self.generation, self.round


_Key = tuple[int, int, int]  # place, generation, round


def judge(fleet: FleetHome) -> Judgement:
    """Compare both sides after all processes ended. Raises :class:`Mismatch`.

    1. Devices and aggregator agree about every update: :func:`check_verdicts`.
    2. The sums are the oracle's over exactly the counted updates: for each device apart.
    3. The state is, bit for bit, that of a method that absorbs the commits in their order and never
       crashed; of a cluster, that of a single process which has the same counted updates.
    4. Rounds rise and versions never fall, on every device and at the aggregator.
    """
    counted = check_verdicts(fleet)
    parts = _all_parts(fleet)
    with closing(fleet.open_store().database) as database:
        _check_versions(database, parts)
        by_slot: dict[int, int] = {}
        lost = twice = 0
        if not fleet.ladder:
            items = _aggregate(fleet)
            lost, twice = _compare(items, counted, len(fleet.devices))
        if fleet.ladder:
            _check_ladder(fleet, database, counted)
        elif fleet.clustered:
            by_slot = _check_shares(database, counted)
            _check_any_order(fleet, database, items, counted)
        else:
            _check_bits(fleet, database, items)
        found = database.row(
            "SELECT count(*), count(next_version) FROM rounds WHERE closed_unix IS NOT NULL"
        )
        assert found is not None
        rounds, versions = found
        late = sum(of < entered for (of, _), entered in _entered(database).items())
        opened = {
            row[0]: row[1]
            for row in database.rows("SELECT round, min(unix) FROM opened GROUP BY round")
        }
    verdicts = Counter(part.verdict for part in parts if part.verdict is not None)
    waiting = sum(part.verdict is None for part in parts)
    counted_in = Counter(number for _, _, number in counted)
    return Judgement(
        len(parts),
        dict(verdicts),
        waiting,
        lost,
        twice,
        rounds,
        versions,
        dict(counted_in),
        opened,
        by_slot,
        late,
    )


def check_verdicts(fleet: FleetHome) -> set[_Key]:
    """The counted updates, as (place, generation, round). Raises :class:`Mismatch`. At any moment:

    1. A device's outbox holds exactly its updates without a verdict; a report alone in it is of a
       round that ended without an update.
    2. What a device was told is what was decided: ``counted`` or the reason of a refusal; ``late``
       only of an update on which nothing was ever decided, ``forgotten`` only of a round whose
       verdicts were deleted, or that the aggregator does not have; ``conflict`` never, for no
       device makes two updates for a round.
    3. The log of verdicts holds all that were ever made, but for those of forgotten rounds.
    4. It knows no update that no device made. One that it knows may still be in its device's
       outbox: the receipt is on its way. What it ``noted`` is no update: it is the report alone of
       a round that the device had a part in, without an update.
    """
    parts = _all_parts(fleet)
    waiting = _waiting(fleet, "length(body) > 0")
    reports_alone = _waiting(fleet, "length(body) = 0")
    untrained = _untrained(fleet)
    without = {part.key for part in parts if part.verdict is None}
    if waiting != without:
        raise Mismatch(f"outboxes and verdicts disagree about {sorted(waiting ^ without)[:5]}")
    if astray := reports_alone - untrained:
        raise Mismatch(f"a report alone of a round with an update, or none: {sorted(astray)[:5]}")
    place_of = {device_id: place for place, device_id in enumerate(fleet.device_ids)}
    with closing(fleet.open_store().database) as database:
        query = "SELECT device_id, generation, round, reason FROM "
        log, made = (
            {(place_of[row[0]], row[1], row[2]): row[3] for row in database.rows(query + table)}
            for table in ("verdicts", "judged")
        )
        query = "SELECT generation, round, forgotten FROM rounds"
        forgotten = {(row[0], row[1]): bool(row[2]) for row in database.rows(query)}
    # Of a forgotten round what was decided, else what the product still says.
    gone = {key: why for key, why in made.items() if forgotten.get(key[1:], True)}
    known_verdicts = log | gone
    for part in parts:
        may_forget = part.key in gone or part.key not in made
        if part.verdict is not None and not _agree(part, known_verdicts, may_forget):
            known = "nothing"
            if part.key in known_verdicts:
                known = _in_words(known_verdicts[part.key])
            raise Mismatch(
                f"device {part.place} was told {part.verdict!r} {part.reason!r} about round "
                f"{part.round}; the log of verdicts says {known}"
            )
    if log != {key: why for key, why in made.items() if key not in gone}:
        changed = sorted({*known_verdicts.items()} ^ {*made.items()}, key=str)
        raise Mismatch(f"the log of verdicts does not hold what was decided: {changed[:5]}")
    noted = {key for key, why in made.items() if why == NOTED}
    if astray := noted - untrained:
        raise Mismatch(f"noted without a device's report: {sorted(astray)[:5]}")
    unknown = made.keys() - noted - {part.key for part in parts}
    if unknown:
        raise Mismatch(f"in the log of verdicts without a device's update: {sorted(unknown)[:5]}")
    return {key for key, reason in made.items() if reason is None}


def _agree(part: _Part, known: Mapping[_Key, str | None], may_forget: bool) -> bool:
    match part.verdict:
        case "counted":
            return part.key in known and known[part.key] is None
        case "refused":
            # What is refused before it is looked at (of a device that was not selected, say) is
            # not in the log.
            return known.get(part.key, part.reason) == part.reason
        case "forgotten":
            return may_forget
        case "noted" | "conflict":
            return False  # there was one update, which was taken for a report alone or for two
    return part.key not in known


def _in_words(reason: str | None) -> str:
    return "'counted'" if reason is None else f"'refused' {reason!r}"


def count_counted(fleet: FleetHome) -> int:
    """Updates of which devices were told that they were counted."""
    return sum(part.verdict == "counted" for part in _all_parts(fleet))


def counted_since(database: Database, number: int) -> dict[bytes, int]:
    """By device id, the first round after ``number`` of which its update was counted."""
    query = "SELECT device_id, min(round) FROM verdicts WHERE round > ? AND reason IS NULL "
    return {bytes(row[0]): row[1] for row in database.rows(query + "GROUP BY 1", (number,))}


def outbox_rows(fleet: FleetHome, place: int) -> list[tuple[int, int]]:
    """(generation, round) of each update, or report alone, in a device's outbox."""
    return _device(fleet, place, "SELECT generation, round FROM outbox")


def _waiting(fleet: FleetHome, where: str) -> set[_Key]:
    query = f"SELECT generation, round FROM outbox WHERE {where}"
    return _keys(fleet, query)


def _untrained(fleet: FleetHome) -> set[_Key]:
    """Of each round that ended on a device without an update."""
    query = (
        "SELECT generation, round FROM "
        "(SELECT * FROM participation UNION ALL SELECT * FROM forgotten) "
        "WHERE outcome <> 'trained'"
    )
    return _keys(fleet, query)


def _keys(fleet: FleetHome, query: str) -> set[_Key]:
    return {
        (place, generation, number)
        for place in range(len(fleet.devices))
        for generation, number in _device(fleet, place, query)
    }


def _all_parts(fleet: FleetHome) -> list[_Part]:
    return [part for place in range(len(fleet.devices)) for part in _parts(fleet, place)]


def _parts(fleet: FleetHome, place: int) -> list[_Part]:
    query = (
        "SELECT generation, round, version, verdict, coalesce(reason, '') FROM "
        "(SELECT * FROM participation UNION ALL SELECT * FROM forgotten) "
        "WHERE outcome = 'trained' ORDER BY number"
    )
    return [_Part(place, *row) for row in _device(fleet, place, query)]


def _device(fleet: FleetHome, place: int, query: str) -> list[tuple]:  # type: ignore[type-arg]
    path = fleet.devices[place] / "device.sqlite"
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=PATIENCE_SECONDS)
    try:
        return database.execute(query).fetchall()
    finally:
        database.close()


def _aggregate(fleet: FleetHome) -> NDArray[np.float32]:
    """The newest version plus what the log holds for the next one."""
    store = fleet.open_store()
    binding = KnownBinding()
    try:
        checkpoint = store.first.checkpoints.get("version")
        if checkpoint is None:
            raise Mismatch("there is no version")
        items = checkpoint.state["items"].copy()
        for logged in store.first.log.after(0):
            update = binding.decode(logged.body, logged.round, fleet.items).tensors
            items[update["rows"], :-1] += update["pulls"] @ update["factor"][:, :-1]
        for share in store.first.shares.sums():
            found = unpack_state(store.first.shares.state(share))
            added = np.ldexp(found["total.sum"].astype(float), -int(found["total.exponent"]))
            items[:, :-1] += added[:, :-1].astype(np.float32)
    finally:
        store.database.close()
    return items


def _compare(
    items: NDArray[np.float32], counted: set[tuple[int, int, int]], devices: int
) -> tuple[int, int]:
    own = np.zeros((ITEMS, devices), dtype=np.float32)
    check = np.zeros(ITEMS, dtype=np.float32)
    for place, generation, number in counted:
        own[number % ITEMS, place] += 1
        check[number % ITEMS] += known_check_value(place, generation, number)
    difference = items[:ITEMS, 1 : 1 + devices] - own
    lost, twice = int(-difference[difference < 0].sum()), int(difference[difference > 0].sum())
    found = items[:ITEMS, 0] / CHECK_UNIT
    if lost or twice or not np.array_equal(found, check):
        raise Mismatch(f"{lost} lost, {twice} counted twice; check sums {found - check}")
    return lost, twice


def _check_versions(database: Database, parts: list[_Part]) -> None:
    version = 0
    query = "SELECT round, version, next_version FROM rounds ORDER BY round"
    for number, carried, following in database.rows(query):
        if carried != version:
            raise Mismatch(f"round {number} carries version {carried} after {version}")
        if following is not None:
            if following != version + 1:
                raise Mismatch(f"round {number} went from version {version} to {following}")
            version = following
    last: dict[int, tuple[int, int]] = {}
    for part in parts:
        before = last.get(part.place, (0, 0))
        if part.round <= before[0] or part.version < before[1]:
            raise Mismatch(f"device {part.place} went from {before} to {part}")
        last[part.place] = (part.round, part.version)


_Commit = tuple[int, bytes, bytes, int]  # round, device id, body, the round that it entered


def _check_bits(fleet: FleetHome, database: Database, items: NDArray[np.float32]) -> None:
    """Replay all commits into a method that never crashed."""
    _replay(fleet, database, items, _bodies(database))


def _check_ladder(fleet: FleetHome, database: Database, counted: set[_Key]) -> None:
    """Exactly the counted updates were committed, and the state is, bit for bit, that of a method
    that absorbed them."""
    bodies = _bodies(database)
    for number, device_id, body, _ in bodies:
        place = fleet.device_ids.index(device_id)
        made = {ladder_body(*key) for key in counted if key[0] == place and key[2] == number}
        if body not in made:
            raise Mismatch(f"round {number} has a body that was not counted, or another one")
    if len(bodies) != len(counted):
        raise Mismatch(f"{len(counted)} updates were counted, {len(bodies)} were committed")
    replayed, checkpoint, carried = _replayed(fleet, database, bodies, LadderBinding())
    mine = replayed.state()
    names = [name for name in checkpoint if name in ("model", "bases") or ".settled." in name]
    apart = [name for name in names if mine[name].tobytes() != checkpoint[name].tobytes()]
    # What the log holds for the next version is in no checkpoint.
    if not carried and apart:
        raise Mismatch(f"not the bits of a run without a crash: {apart}")


def _check_any_order(
    fleet: FleetHome, database: Database, items: NDArray[np.float32], counted: set[_Key]
) -> None:
    """The same of a cluster, whose order is that of device ids. Where a round adds up there are no
    bodies: a verdict says that one was counted, and everybody knows what was in it."""
    known = {
        (number, fleet.device_ids[place]): known_body(place, generation, number)
        for place, generation, number in counted
    }
    for number, device_id, body, _ in _bodies(database):
        if known.get((number, device_id)) != body:
            raise Mismatch(f"round {number} has a body that was not counted, or another one")
    entered = _entered(database)
    _replay(fleet, database, items, [(*key, known[key], entered[key]) for key in sorted(known)])


def _check_shares(database: Database, updates: set[_Key]) -> dict[int, int]:
    """Each commit of a slot follows the one before, and no epoch follows a later one; all slots
    together counted as many of a round as have a verdict that says so. What each slot counted."""
    last: dict[tuple[int, int], tuple[int, int, int]] = {}
    epochs: Counter[int] = Counter()
    query = "SELECT round, slot, epoch, commits, counted FROM audit_shares ORDER BY n"
    for number, slot, *found in database.rows(query):
        epoch, commits, counted = found
        before = last.get((number, slot), (0, 0, 0))
        if epoch < epochs[slot] or commits != before[1] + 1 or counted < before[2]:
            raise Mismatch(f"slot {slot} wrote {found} of round {number} after {before}")
        last[number, slot] = epoch, commits, counted
        epochs[slot] = epoch
    of_rounds, of_slots = Counter[int](), Counter[int]()
    for (number, slot), (_, _, counted) in last.items():
        of_rounds[number] += counted
        of_slots[slot] += counted
    query = "SELECT entered FROM judged WHERE reason IS NULL"
    judged = Counter(row[0] for row in database.rows(query))
    if judged.total() != len(updates) or +of_rounds != judged:
        apart = sorted(
            number for number in of_rounds | judged if of_rounds[number] != judged[number]
        )
        said = {number: (of_rounds[number], judged[number]) for number in apart[:5]}
        raise Mismatch(f"slots and verdicts have other numbers of updates, by round: {said}")
    return dict(of_slots)


def _bodies(database: Database) -> list[_Commit]:
    """All that were ever committed, in their order."""
    query = "SELECT round, device_id, body, entered FROM audit ORDER BY n"
    audit = [(row[0], bytes(row[1]), bytes(row[2]), row[3]) for row in database.rows(query)]
    if len(audit) != len({row[:2] for row in audit}):
        raise Mismatch("an update was committed twice")
    return audit


def _entered(database: Database) -> dict[tuple[int, bytes], int]:
    """By round and device of each update that was counted, the round that it entered."""
    query = "SELECT round, device_id, entered FROM judged WHERE reason IS NULL"
    return {(row[0], bytes(row[1])): row[2] for row in database.rows(query)}


def _replay(
    fleet: FleetHome, database: Database, items: NDArray[np.float32], commits: list[_Commit]
) -> None:
    method, checkpoint, carried = _replayed(
        fleet, database, commits, known_binding(adds_up=fleet.adds_up)
    )
    if method.state()["items"].tobytes() != checkpoint["items"].tobytes():
        raise Mismatch("not the bits of a run without a crash")
    if not carried and items.tobytes() != checkpoint["items"].tobytes():
        raise Mismatch("the log holds updates that no round without quorum left")


def _replayed(
    fleet: FleetHome, database: Database, commits: list[_Commit], binding: Binding[Any]
) -> tuple[Method, Mapping[str, NDArray[Any]], bool]:
    """A method that never crashed, the newest version's state, and whether updates are left that
    made no version."""
    method: Method = binding.build(fleet.items, np.random.default_rng(0))
    carried: list[_Commit] = []
    query = "SELECT round, version, next_version FROM rounds ORDER BY round"
    versions: dict[int, int] = {}
    for number, version, following in list(database.rows(query)):
        versions[number] = version
        method.open_round(number)
        carried += [row for row in commits if row[3] == number]
        for of, device_id, body, _ in carried:
            update = binding.decode(body, of, fleet.items, device_id.hex())
            method.absorb(replace(update, age=version - versions[of]))
        if following is not None:
            method.close_round()
            carried = []
    store = fleet.open_store()
    try:
        checkpoint = store.first.checkpoints.get("version")
    finally:
        store.database.close()
    assert checkpoint is not None
    return method, checkpoint.state, bool(carried)
