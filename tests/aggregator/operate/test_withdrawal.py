"""Codes that nobody has used are listed without their secrets, and withdrawn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator import Fleet
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.enrolment import Enrolment
from device_sdk import EnrolmentFailed
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.enrolment_message import parse_code
from tests.aggregator.keys.test_enrolment import Office
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.homes import command, make_home, serving
from tests.fakes.outputs import error_of, output_of
from tests.fakes.quick import joined
from tests.fakes.waiting import wait_until


@pytest.fixture
def home(tmp_path: Path) -> AggregatorHome:
    return make_home(tmp_path, "mqtt://127.0.0.1:1")


@pytest.fixture
def fleet(home: AggregatorHome) -> Iterator[Fleet]:
    with Fleet.open(home.folder, actor="anna") as opened:
        yield opened


def test_unused_codes_are_listed_by_ids_that_let_nobody_join(fleet: Fleet) -> None:
    (last,) = fleet.invite(expires_seconds=7200)
    (first,) = fleet.invite(expires_seconds=3600, name="hall-3", labels={"site": "north"})
    listed = fleet.unused_codes()
    assert [each.code_id for each in listed] == [
        parse_code(each).token_id.hex()[:12] for each in (first, last)
    ]
    assert (listed[0].name, listed[0].labels) == ("hall-3", {"site": "north"})
    assert 3500 < listed[0].expires_unix_seconds - time.time() <= 3600
    assert not any(parse_code(first).secret.hex() in repr(each) for each in listed)


def test_one_is_withdrawn_once(fleet: Fleet) -> None:
    fleet.invite(2)
    first, second = fleet.unused_codes()
    with pytest.raises(AggregatorError, match="no code that can still be used"):
        fleet.withdraw("")
    assert fleet.withdraw(first.code_id[:8].upper()) == first
    assert fleet.unused_codes() == [second]
    with pytest.raises(AggregatorError, match=r"no code that can still be used.*invite --list"):
        fleet.withdraw(first.code_id)


def test_the_command_lists_and_withdraws(
    home: AggregatorHome, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no code can be used" in output_of(capsys, home, "invite", "--list")
    assert command(home, "invite", "--name", "hall-3", "--label", "site=north") == 0
    secret = capsys.readouterr().out.strip()
    code_id = parse_code(secret).token_id.hex()[:12]
    shown = output_of(capsys, home, "invite", "--list")
    assert f"{code_id}  hall-3  site=north" in shown and secret not in shown
    said = output_of(capsys, home, "invite", "--withdraw", code_id)
    assert said == f"code {code_id} is withdrawn: nobody joins with it\n"
    assert "no code that can still be used" in error_of(
        capsys, home, "invite", "--withdraw", code_id
    )


def test_a_used_code_cannot_be_withdrawn_and_a_withdrawn_one_not_used(fleet: Fleet) -> None:
    office = Office(fleet.home)
    used, withdrawn = (parse_code(each) for each in fleet.invite(2))
    attempt = office.attempt("anna", used)
    assert attempt.accept(office.answer(attempt).message)
    with pytest.raises(AggregatorError, match=r"was used by .*: revoke sends a device away"):
        fleet.withdraw(used.token_id.hex())
    fleet.withdraw(withdrawn.token_id.hex())
    with pytest.raises(WireError) as caught:
        office.answer(office.attempt("bert", withdrawn))
    assert caught.value.reason == "unknown-token"
    assert len(list(office.store.devices.all())) == 1
    again = office.attempt("anna", used)
    assert again.accept(office.answer(again).message)
    office.store.database.close()


def test_withdrawn_between_a_request_and_its_answer_nobody_joins(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Office(fleet.home)
    code = parse_code(fleet.invite()[0])
    join = Enrolment._join

    def late(self: Enrolment, *given: object) -> None:
        fleet.withdraw(code.token_id.hex())
        join(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Enrolment, "_join", late)
    with pytest.raises(WireError, match="withdrawn just now"):
        office.answer(office.attempt("anna", code))
    assert list(office.store.devices.all()) == []
    office.store.database.close()


def test_of_withdrawal_and_use_at_once_one_wins(fleet: Fleet) -> None:
    office, joins, withdrawals = Office(fleet.home), 0, 0
    for number in range(20):
        code = parse_code(fleet.invite()[0])
        attempt = office.attempt(f"device-{number}", code)
        ready, outcome = threading.Barrier(2), list[bool]()

        def withdraw(
            ready: threading.Barrier = ready,
            outcome: list[bool] = outcome,
            of: str = code.token_id.hex(),
        ) -> None:
            with Fleet.open(fleet.home.folder, actor="bert") as other:
                ready.wait(60)
                try:
                    other.withdraw(of)
                    outcome.append(True)
                except AggregatorError:
                    outcome.append(False)

        thread = threading.Thread(target=withdraw)
        thread.start()
        ready.wait(60)
        try:
            office.answer(attempt)
            joined_here = True
        except WireError:
            joined_here = False
        thread.join(60)
        assert outcome == [not joined_here]
        joins, withdrawals = joins + joined_here, withdrawals + outcome[0]
    assert len(list(office.store.devices.all())) == joins and joins + withdrawals == 20
    office.store.database.close()


def test_a_device_with_a_withdrawn_code_does_not_join_over_a_broker(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url)
    with serving(home) as served, Fleet.open(home.folder, actor="anna") as fleet:
        withdrawn, kept = fleet.invite(2)
        fleet.withdraw(parse_code(withdrawn).token_id.hex())
        with pytest.raises(EnrolmentFailed):
            joined(mosquitto.url, withdrawn, tmp_path / "first", timeout_seconds=3.0)
        wait_until(lambda: served.parts.refusals.counts["unknown-token"] > 0)
        joined(mosquitto.url, kept, tmp_path / "second").close()
        (device,) = fleet.devices()
        assert device.revoked_unix_seconds is None
