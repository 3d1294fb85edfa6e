"""A home with much in it, for whatever shows a fleet: devices in all states, rounds, figures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from aggregator.evaluation import Figure
from aggregator.home import AggregatorHome
from aggregator.store import Store
from aggregator.store.rows import (
    DeviceRow,
    Habit,
    LastParticipation,
    RoundRow,
    StoredReport,
    StoredVerdict,
    VersionRow,
)
from device_sdk.evaluation.report import ALONE, STAGES
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.report import Details, ItemCount, Report, ReportedOutcome
from tests.fakes.homes import make_home, serving

MORE = '[evaluation]\nmetrics = ["hr10", "ndcg10"]\nleast_devices = 5\n'
PARTS = ("k=2", "k=4", "k=8")
_DAY = 86_400


def device_id(place: int) -> bytes:
    """Of the ``place``-th device."""
    return place.to_bytes(2, "big") * 8


def full_home(
    folder: Path,
    now: float,
    devices: int = 40,
    versions: int = 30,
    url: str = "mqtt://127.0.0.1:1",
    counted: int = 4,
) -> AggregatorHome:
    """A home that was served, filled by :func:`fill`, and can be served again."""
    home = make_home(folder, url, "quorum = 2", MORE)
    with serving(home):
        pass
    store = home.open_store()
    with store.database.transaction():
        fill(store, now, devices, versions, counted)
    store.database.close()
    return home


def fill(store: Store, now: float, devices: int, versions: int, counted: int = 4) -> None:
    """Inside a transaction. The last round is open; so many updates were counted in it, of which
    nothing but that is there."""
    rng = np.random.default_rng(4)
    _devices(store, int(now), devices)
    for row in store.first.rounds.latest(1000):  # those of the serve that made the home
        store.first.rounds.give_up(row.round, now)
    first = max((row.round for row in store.first.rounds.latest()), default=0) + 1
    for version in range(1, versions + 1):
        _version(store, now, version, versions, rng, devices, first + version - 1)
    _open_round(store, now, versions, first + versions, devices, counted)
    _told(store, now, first + versions - 1, devices, rng)
    store.refusals.add({"late": 3, "bad-signature": 1})


def _devices(store: Store, now: int, count: int) -> None:
    for place in range(count):
        name = device_id(place)
        site = "north" if place % 2 else "south"
        row = DeviceRow(
            name, name * 2, name, bytes(32), 0, name[:8], now - 9 * _DAY + place, 1,
            labels={"site": site, "line": f"l{place % 5}"}, name=f"Hall-{place}",
        )  # fmt: skip
        store.devices.add(row)
    store.devices.note_seen(
        {device_id(place): now - (2 * _DAY if place % 10 == 3 else 60) for place in range(count)}
    )
    store.devices.note_clashes({device_id(5): now - 3600})
    if count > 7:
        store.devices.revoke(device_id(7), now - _DAY)


def _version(
    store: Store,
    now: float,
    version: int,
    versions: int,
    rng: np.random.Generator,
    devices: int,
    number: int,
) -> None:
    opened = now - 120.0 * (versions + 1 - version)
    learnt = 1 - math.exp(-version / 8)
    store.first.rounds.add(
        RoundRow(
            number,
            1,
            version - 1,
            opened,
            opened + 90,
            bytes(32),
            2**64 - 1,
            devices,
            20,
            closed_unix_seconds=opened + 60,
            next_version=version,
            participants=devices - 2,
            metrics={"loss": 1.4 - learnt, "columns": 5.5},
            took_seconds=60.0,
        )
    )
    figures = [
        _figure(stage, metric, part, learnt, rng, devices, version)
        for stage in STAGES
        for metric in ("hr10", "ndcg10")
        for part in ("", *PARTS)
        if stage != ALONE or not part
    ]
    store.first.evaluations.put(version, number, figures)
    model = {"items": np.zeros((20, 8), np.float32)}
    told = {"hr10": figures[0].value, "hr10.typical": figures[0].typical}
    store.first.versions.add(
        VersionRow(
            version, number, opened + 60, devices - 2, "", "", 0, told,
            pinned=version == 3, kept=True, items=20,
        ),
        model if version > versions - 6 or version == 3 else None,
    )  # fmt: skip
    served = store.first.checkpoints.get("version")
    assert served is not None
    state = {**served.state, "version": np.full_like(served.state["version"], version)}
    store.first.checkpoints.put(replace(served, round=number, version=version, state=state))


def _figure(
    stage: str,
    metric: str,
    part: str,
    learnt: float,
    rng: np.random.Generator,
    devices: int,
    rounds: int,
) -> Figure:
    best = {"global": 0.5, "personal": 0.6, "alone": 0.4}[stage]
    best *= 0.7 if metric == "ndcg10" else 1.0
    best *= {"k=2": 0.8, "k=4": 0.95}.get(part, 1.0)
    value = best * learnt + float(rng.normal(0, 0.005))
    more = {}
    if stage != ALONE and not part:
        more = {"over_alone": value - 0.4 * learnt, "over_alone_half_width": 0.05}
        more |= {"control_devices": 8, "control_rounds": rounds}
    return Figure(
        stage, metric, part, devices // (3 if part else 1), 100.0, 0, value, 0.0, value,  # type: ignore[arg-type]
        deciles=tuple(value * (0.5 + place / 10) for place in range(9)), typical=value, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def _open_round(
    store: Store, now: float, version: int, number: int, devices: int, counted: int
) -> None:
    row = RoundRow(
        number,
        1,
        version,
        now - 30,
        now + 3570,
        bytes(32),
        2**64 - 1,
        devices - 1,
        20,
        opening=number,
    )
    store.first.rounds.add(row)
    took_in(store, number, range(counted))
    verdict = StoredVerdict(1, number, device_id(9), bytes(32), "stale-version", 6.0)
    store.first.log.append([], [verdict])


def took_in(store: Store, number: int, places: range) -> None:
    """Updates of these devices were counted in the open round."""
    store.first.log.append(
        [], [StoredVerdict(1, number, device_id(each), bytes(32), None, 5.0) for each in places]
    )


def _told(store: Store, now: float, number: int, devices: int, rng: np.random.Generator) -> None:
    seen, habits = {}, {}
    for place in range(devices):
        width = (2, 4, 8)[place % 3]
        failed = place % 11 == 4
        details = Details(
            "0.2.0", "1.20.1", "Linux aarch64", f"k={width}",
            None if failed else width * (0.1 + 0.05 * float(rng.random())), 40_000 + place,
            {"own": f"o{place}"}, ItemCount(20, place % 4),
        )  # fmt: skip
        outcome = ReportedOutcome.FAILED if failed else ReportedOutcome.TRAINED
        report = Report(outcome, "not-finite" if failed else "", details)
        of_rounds = range(number - 2, number + 1)
        store.first.reports.add(
            [StoredReport.of(1, each, device_id(place), report) for each in of_rounds]
        )
        seen[device_id(place)] = LastParticipation(
            int(now) - 100, width, int(now) - 90, number, encode(report)
        )
        habits[device_id(place)] = Habit(5.0 + place, missed=place % 2)
    store.first.participations.note(seen)
    store.first.habits.put(habits)
