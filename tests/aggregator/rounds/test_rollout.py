"""No round opens any more once what a task sends out does harm to a share of its devices."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.home import AggregatorHome
from aggregator.rounds.machine import HARM, Rollout, RoundClosed, RoundOpened
from aggregator.task.file import RoundSettings
from device_sdk.wire.publish.report import Reason, Report, ReportedOutcome
from tests.aggregator.rounds.test_ingest import Desk, body
from tests.aggregator.rounds.test_reports import TRAINED, offer
from tests.fakes.homes import command, make_home
from tests.fakes.outputs import output_of
from tests.fakes.parts import enrol

DEVICES = [bytes([65 + index]) * 16 for index in range(6)]
Part = Literal["trained", "harmed", "declined", "silent"]
LINES = "quorum = 1\ndeadline_seconds = 100.0\nresume_grace_seconds = 0.0"
REPORTS = {
    "harmed": Report(ReportedOutcome.DECLINED, Reason.STEP_TOO_LONG.value),
    "declined": Report(ReportedOutcome.DECLINED, Reason.NO_DATA.value),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> AggregatorHome:
    home = make_home(tmp_path_factory.mktemp("rollout"), "mqtt://127.0.0.1:1", LINES)
    enrol(home, DEVICES)
    return home


@contextmanager
def desk_of(template: AggregatorHome) -> Iterator[tuple[Desk, AggregatorHome]]:
    folder = Path(tempfile.mkdtemp())
    home = AggregatorHome(folder / "home")
    shutil.copytree(template.folder, home.folder)
    desk = Desk(home)
    try:
        yield desk, home
    finally:
        desk.parts.store.database.close()
        shutil.rmtree(folder)


def play(desk: Desk, parts: list[Part]) -> str | None:
    """One round, in which each device does so; why none opens after it, None where one did."""
    for device, part in zip(DEVICES, parts, strict=True):
        if part == "trained":
            offer(desk, desk.identity(device), TRAINED, body())
        elif part != "silent":
            offer(desk, desk.identity(device), REPORTS[part])
    machine = desk.parts.first.rounds
    desk.now_seconds = desk.row.deadline_unix_seconds
    assert isinstance(machine.tick(), RoundClosed)
    event = machine.tick()
    assert (event is None) is (machine.unpublished is not None)
    if isinstance(event, RoundOpened):
        desk.ingest.round_opened()
    return machine.unpublished


@settings(max_examples=12, deadline=None)
@given(
    rounds=st.lists(
        st.lists(
            st.sampled_from(["trained", "harmed", "declined", "silent"]), min_size=6, max_size=6
        ),
        min_size=1,
        max_size=4,
    )
)
def test_rounds_stop_where_half_of_those_who_were_heard_of_were_harmed_and_only_there(
    template: AggregatorHome, rounds: list[list[Part]]
) -> None:
    with desk_of(template) as (desk, _):
        for parts in rounds:
            heard = [each for each in parts if each != "silent"]
            harmed = heard.count("harmed")
            stops = len(heard) >= 4 and 2 * harmed >= len(heard)
            why = play(desk, parts)
            assert (why is not None) is stops
            if why is not None:
                assert f"of {len(heard)} devices" in why and f"{harmed} failed" in why
                assert "step-too-long" in why and "task replace" in why
                break


def test_it_is_said_survives_a_restart_and_goes_on_when_the_operator_says_so(
    template: AggregatorHome, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with desk_of(template) as (desk, home):
        assert play(desk, ["harmed", "harmed", "harmed", "trained", "silent", "silent"])
        assert "of 4 devices that took it 3 failed (step-too-long)" in caplog.text
        again = Desk(home, opens=False)
        assert again.parts.first.rounds.tick() is None
        again.parts.store.database.close()
        assert "3 failed (step-too-long)" in output_of(capsys, home, "status")
        assert command(home, "release") == 0
        desk.parts.first.rounds.reload_hold()
        assert isinstance(desk.parts.first.rounds.tick(), RoundOpened)


def test_devices_that_fall_silent_when_a_task_is_replaced_stop_it_and_sleepers_do_not(
    template: AggregatorHome,
) -> None:
    everyone: list[Part] = ["trained"] * 6
    asleep: list[Part] = ["trained", "trained", *["silent"] * 4]  # type: ignore[list-item]

    def replaced(desk: Desk) -> None:
        # What a replacement is to rounds: they are of another generation, from the next one on.
        facts = desk.parts.store.first.facts
        facts.own_generation = facts.generation + 1

    with desk_of(template) as (desk, _):
        for parts in (everyone, asleep, asleep, asleep, everyone):
            assert play(desk, parts) is None, "a fleet sleeps, and nobody has to come"
        replaced(desk)
        for parts in (everyone, everyone, asleep, asleep):
            assert play(desk, parts) is None, "they came through what is new"
        play(desk, everyone)
    with desk_of(template) as (desk, _):
        play(desk, everyone)
        replaced(desk)
        play(desk, everyone)  # the last of the old generation is open already
        assert play(desk, asleep) is None, "one round may be missed"
        why = play(desk, asleep)
        assert why is not None and "4 fell silent" in why
    with desk_of(template) as (desk, _):
        play(desk, everyone)
        replaced(desk)
        play(desk, everyone)
        assert play(desk, asleep) is None
        assert play(desk, everyone) is None, "they are back"


def test_the_thresholds_are_settings() -> None:
    harm = Rollout(10, {"crashed": 4})
    assert harm.why_to_stop(RoundSettings()) is None
    assert harm.why_to_stop(RoundSettings(abort_share=0.4)) is not None
    assert harm.why_to_stop(RoundSettings(abort_share=0.4, abort_devices=11)) is None
    assert Rollout(10, {"crashed": 10}).why_to_stop(RoundSettings(abort_devices=0)) is None
    assert Rollout(3, {"crashed": 3}).why_to_stop(RoundSettings()) is None
    assert {"no-data", "bad-data", "not-now", "too-late", "error"}.isdisjoint(HARM)
