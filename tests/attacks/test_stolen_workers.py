"""A cluster's worker in the hands of a thief: what it was told, and what that can be used for."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aggregator.cluster.coordinator import Crew, posts
from aggregator.cluster.orders import Orders, keyring_of
from aggregator.cluster.worker import WorkerStatus
from aggregator.store.rows import ShareRow
from aggregator.task.cluster import Cluster
from aggregator.task.file import read_task
from device_sdk.wire.publish.topics import PresenceTopic, TasksTopic
from device_sdk.wire.seal.admission import TokenBuckets, WorkBudget
from device_sdk.wire.seal.announcement import ServedTasks, announce, new_presence
from device_sdk.wire.seal.enrolment import EnrolmentAttempt, EnrolmentDesk, Token
from device_sdk.wire.seal.enrolment_message import new_code
from device_sdk.wire.seal.freshness import Freshness
from device_sdk.wire.seal.keyring import HandshakeKeys, Keyring
from device_sdk.wire.seal.keys import KeyKind, read_key
from tests.attacks.stage import Stage
from tests.attacks.test_broadcasts import _forge
from tests.fakes.parties import EXPIRES, INCARNATION, NOW, key_from, make_serving
from tests.fakes.refusals import reason_of


class _Told:
    """Workers that only listen."""

    def __init__(self) -> None:
        self.orders: list[Orders] = []

    def tend(self, revision: int, orders: Orders) -> None:
        self.orders.append(orders)

    def statuses(self) -> list[WorkerStatus]:
        return []

    def shares(self, task: int, rows: Sequence[ShareRow]) -> list[bytes | None]:
        return [None] * len(rows)

    def stop(self) -> None:
        pass

    def leave(self) -> None:
        pass


def _orders(stage: Stage) -> Orders:
    told = _Told()
    Crew(told, stage.fleet.aggregator, stage.parts).tend()
    return told.orders[-1]


def _secret(path: Path) -> bytes:
    kind = KeyKind.HPKE if path.name.startswith("hpke") else KeyKind.ED25519
    return read_key(path, kind)


def test_a_worker_is_told_the_keys_of_sessions_and_no_other(stage: Stage) -> None:
    """All that travels in a call to its actor: nothing of the delegate's, the root's, nor what
    manifests are signed with, of the descriptor in force or the one before."""
    assert stage.command("rotate", "keys") == 0
    stage.next_version()
    home, store = stage.fleet.aggregator, stage.parts.store
    settings = read_task(home.task_file).fleet
    orders = _orders(stage)
    arguments = pickle.dumps((posts(home, store, Cluster(), settings), orders))
    files = sorted(home.keys.iterdir())
    told = {path.name for path in files if _secret(path) in arguments}
    honoured = [each.descriptor.serial for each in stage.parts.keys.keyring]
    assert len(honoured) == 2
    assert told == {f"{kind}-{serial}.key" for kind in ("sessions", "hpke") for serial in honoured}
    kept = {path.name.partition("-")[0] for path in files} - {"sessions", "hpke"}
    assert kept == {"root.key", "delegate", "signing"}


def _stolen(stage: Stage) -> HandshakeKeys:
    return keyring_of(_orders(stage).keys).newest


def test_what_a_stolen_worker_signs_for_the_fleet_is_believed_by_nobody(stage: Stage) -> None:
    """It knows the group key, which workers tell devices, and owns the broker."""
    stage.next_version()
    thief = _stolen(stage)
    jobs = stage.devices[0].jobs
    (key,) = stage.parts.keys.group_keys()
    life = stage.parts.life.incarnation
    tasks = announce(ServedTasks(life, 9, (("films", "all"),)), thief.descriptor, thief.sessions)
    later = new_presence(int(stage.unix()) + 60, os.urandom)
    presence = announce(later, thief.descriptor, thief.sessions)
    forged = [
        *_forge(stage, key, thief.sessions),
        (stage.topics.write(TasksTopic()), tasks),
        (stage.topics.write(PresenceTopic()), presence),
    ]
    before = stage.refused().get("bad-signature", 0)
    for topic, message in forged:
        stage.broker.publish(topic, message, retain=True)
        stage.settle()
    assert stage.refused()["bad-signature"] == before + 3
    assert stage.devices[0].jobs == jobs
    assert stage.devices[0].participant.problem == ""
    stage.next_version()


def test_what_a_stolen_worker_answers_to_who_enrols_is_no_answer() -> None:
    serving = make_serving(5)
    thief = replace(serving, signing=serving.sessions)
    code = new_code(serving.descriptor.root_fingerprint, 5, NOW - 60)
    assert NOW < EXPIRES
    for keys, is_believed in ((thief, False), (serving, True)):
        attempt = EnrolmentAttempt(
            code, serving.descriptor, key_from("new"), Freshness(INCARNATION, 1)
        )
        desk = EnrolmentDesk(
            Keyring([keys]),
            INCARNATION,
            TokenBuckets(9, 9, time.monotonic),
            WorkBudget(1.0, time.monotonic),
            lambda: float(NOW),
        )
        outcome = desk.answer(attempt.message, Token(code.token_id, code.secret, NOW + 60))
        if is_believed:
            assert attempt.accept(outcome.answer).grant.device_id
        else:
            assert reason_of(attempt.accept, outcome.answer) == "bad-signature"
