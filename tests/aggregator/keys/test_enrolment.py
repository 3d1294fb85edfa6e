"""What an enrolment leaves in the store and in memory; no broker."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aggregator.home import AggregatorHome
from aggregator.keys.enrolment import Enrolment, EnrolmentAnswer, make_codes
from aggregator.serve.assembly import World, assemble
from aggregator.task.file import read_task
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.announcement import Presence, read_announcement
from device_sdk.wire.seal.enrolment import EnrolmentAttempt
from device_sdk.wire.seal.enrolment_message import EnrolmentCode, new_code
from device_sdk.wire.seal.freshness import Freshness
from tests.fakes.homes import make_home
from tests.fakes.parties import SeededBytes, key_from

VALID_SECONDS = 3600


class Office:
    """An aggregator whose calendar stands still, and one code. ``first_round``: of who enrols."""

    def __init__(self, home: AggregatorHome) -> None:
        store = home.open_store()
        self.now_seconds = float(store.facts.generation) + 0.75
        world = World(self.now, self.now, np.random.default_rng(1))
        self.parts = assemble(home, store, read_task(home.task_file), world)
        self.store = self.parts.store
        self.first_round = 7
        uplink = self.parts.uplink
        self.enrolment = Enrolment(
            uplink._enrolment.desk,
            self.store,
            self.parts.registry,
            self.parts.refusals,
            self.now,
            lambda: self.first_round,
        )
        self.code = self.new_code("code")
        self.counter = 0

    def now(self) -> float:
        return self.now_seconds

    def new_code(self, name: str) -> EnrolmentCode:
        now = int(self.now_seconds)
        (code,) = make_codes(self.store, 1, now, SeededBytes(name))
        with self.store.database.transaction():
            self.store.tokens.add(code, now, now + VALID_SECONDS, None)
        return code

    def attempt(self, name: str, code: EnrolmentCode | None = None) -> EnrolmentAttempt:
        self.counter += 1
        descriptor = self.parts.keys.current().descriptor
        _, message = self.parts.announcements.presence()
        life = read_announcement(Presence, message, descriptor).incarnation
        freshness = Freshness(life, self.counter)
        return EnrolmentAttempt(code or self.code, descriptor, key_from(name), freshness)

    def answer(self, attempt: EnrolmentAttempt) -> EnrolmentAnswer:
        return self.enrolment.answer(attempt.message)


def public(name: str) -> bytes:
    return key_from(name).public_key().public_bytes_raw()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> AggregatorHome:
    return make_home(tmp_path_factory.mktemp("enrolment"), "mqtt://127.0.0.1:1")


@pytest.fixture
def office(template: AggregatorHome, tmp_path: Path) -> Iterator[Office]:
    home = AggregatorHome(tmp_path / "home")
    shutil.copytree(template.folder, home.folder)
    made = Office(home)
    yield made
    made.store.database.close()


def test_a_device_that_enrols_stands_in_the_store_before_it_is_told(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = office.attempt("anna")
    with caplog.at_level(logging.INFO):
        answer = office.answer(attempt)
    assert answer.mailbox == attempt.mailbox
    grant = attempt.accept(answer.message).grant
    assert f"enrolled {grant.device_id.hex()}" in caplog.messages
    (row,) = office.store.devices.all()
    assert (row.device_id, row.handle, row.admission_key, row.shard) == (
        grant.device_id,
        grant.handle,
        grant.admission_key,
        grant.shard,
    )
    assert (row.identity, row.token_id) == (public("anna"), office.code.token_id)
    assert row.enrolled_unix_seconds == int(office.now_seconds) and row.first_round == 7
    assert row.revoked_unix_seconds is None
    token = office.store.tokens.find(office.code.token_id)
    assert token is not None and token.device_id == grant.device_id and token.strangers == 0
    assert office.parts.registry.by_handle(grant.handle) == row, "it may speak at once"


def test_asked_again_it_is_told_the_same_and_joins_no_second_time(office: Office) -> None:
    first, again = office.attempt("anna"), office.attempt("anna")
    grant = first.accept(office.answer(first).message).grant
    office.first_round = 9
    office.now_seconds += 2 * VALID_SECONDS  # the code's time is over, and matters no more
    assert again.accept(office.answer(again).message).grant == grant
    (row,) = office.store.devices.all()
    assert row.first_round == 7
    assert not office.parts.refusals.counts


def test_a_stranger_with_a_used_code_is_refused_counted_and_shown(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    office.answer(office.attempt("anna"))
    (row,) = office.store.devices.all()
    for name in ("thief", "other"):
        attempt = office.attempt(name)
        with caplog.at_level(logging.WARNING):
            answer = office.answer(attempt)
        assert answer.mailbox == attempt.mailbox
        with pytest.raises(WireError) as caught:
            attempt.accept(answer.message)
        assert caught.value.reason == "code-used"
    assert office.parts.refusals.counts == {"code-used": 2}
    (token,) = office.store.tokens.tried_by_strangers()
    assert (token.token_id, token.strangers) == (office.code.token_id, 2)
    assert token.last_stranger == public("other")
    assert [each.device_id for each in office.store.devices.all()] == [row.device_id]
    for name in ("thief", "other"):
        key = public(name).hex()[:16]
        shown = f"the code of {row.device_id.hex()} was tried by another key, {key}..."
        assert shown in caplog.messages
    assert office.code.secret.hex() not in caplog.text
    assert any(row.device_id.hex() in each for each in caplog.messages if "logged once" in each)


def test_an_expired_code_and_a_revoked_device_are_refused_and_no_stranger_is_noted(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    late, revoked = office.code, office.new_code("second")
    attempt = office.attempt("anna", revoked)
    grant = attempt.accept(office.answer(attempt).message).grant
    with office.store.database.transaction():
        assert office.store.devices.revoke(grant.device_id, int(office.now_seconds))
    office.now_seconds += VALID_SECONDS
    for code, name, reason in ((late, "bert", "code-expired"), (revoked, "anna", "revoked")):
        attempt = office.attempt(name, code)
        answer = office.answer(attempt)
        with pytest.raises(WireError) as caught:
            attempt.accept(answer.message)
        assert caught.value.reason == reason
    assert office.parts.refusals.counts == {"code-expired": 1, "revoked": 1}
    assert office.store.tokens.tried_by_strangers() == []
    said = [each for each in caplog.messages if "logged once" in each]
    assert "unknown sender" in said[0] and grant.device_id.hex() in said[1]


def test_a_code_that_was_not_made_here_is_not_answered(office: Office) -> None:
    descriptor = office.parts.keys.current().descriptor
    strange = new_code(descriptor.root_fingerprint, descriptor.serial, 0, SeededBytes("strange"))
    with pytest.raises(WireError) as caught:
        office.answer(office.attempt("anna", strange))
    assert caught.value.reason == "unknown-token"
    assert list(office.store.devices.all()) == []
