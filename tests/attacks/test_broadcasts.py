"""What a broker, or an enrolled device that knows the group key, can do with broadcasts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from aggregator.methods.method import Method
from device_sdk.artifact import Artifact
from device_sdk.wire.codec.message import decode, encode
from device_sdk.wire.publish.manifest import (
    RoundManifest,
    seal_chunks,
)
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    ManifestTopic,
    PresenceTopic,
    TasksTopic,
)
from device_sdk.wire.seal.announcement import Presence, ServedTasks, announce, read_announcement
from device_sdk.wire.seal.broadcast import (
    GroupKey,
    Publication,
    derive_broadcast_keys,
    open_manifest,
)
from device_sdk.wire.seal.signature import public_key
from tests.attacks.conftest import MakeStage
from tests.attacks.simulated_broker import Parcel
from tests.attacks.stage import Stage
from tests.faults.known import KnownBinding, KnownSums


def _manifest_topic(stage: Stage) -> str:
    return stage.topics.write(ManifestTopic("default", "all"))


def _manifests(stage: Stage) -> list[bytes]:
    return [m for at, m in stage.broker.seen if at == _manifest_topic(stage)]


def _open(stage: Stage, message: bytes, key: GroupKey) -> RoundManifest:
    keys = derive_broadcast_keys(key, message[10:42], "default", "all")
    signing = public_key(stage.parts.keys.current().descriptor.signing)
    return decode(RoundManifest, open_manifest(message, keys, signing))


def test_a_rolled_back_manifest_is_refused(stage: Stage) -> None:
    stage.next_version()
    jobs = [device.jobs for device in stage.devices]
    for _ in range(5):
        stage.broker.publish(_manifest_topic(stage), _manifests(stage)[0], retain=True)
        stage.settle()
    assert stage.refused()["stale-manifest"] == 5
    assert [device.jobs for device in stage.devices] == jobs
    stage.next_version()


def test_a_rolled_back_manifest_is_refused_after_a_restart_too(stage: Stage) -> None:
    stage.next_version()
    old, device = _manifests(stage)[0], stage.devices[0]
    device.kill()
    stage.broker.retained[_manifest_topic(stage)] = old
    device.start()
    jobs = device.jobs
    stage.settle()
    assert stage.refused()["stale-manifest"] >= 1
    assert device.jobs == jobs


def test_a_withheld_manifest_costs_its_round_and_no_more(stage: Stage) -> None:
    topic = _manifest_topic(stage)
    stage.drop = lambda parcel: parcel.topic == topic and parcel.to == "device-0"
    stage.run(300.0)
    missed = stage.parts.store.first.rounds.latest()[0].round
    stage.drop = lambda parcel: False
    stage.run_until(lambda: stage.verdict(0, missed + 1) == "counted")


def test_chunks_of_another_broadcast_are_refused(stage: Stage) -> None:
    old = [(at, m) for at, m in stage.broker.seen if "/chunk/" in at and m[:2] == b"\x01\x08"]
    mixed = 0

    def swap(parcel: Parcel) -> bool:
        nonlocal mixed
        at, payload = parcel.topic, parcel.payload
        if "/chunk/" in at and payload[:2] == b"\x01\x08" and parcel.to == "device-0":
            mixed += 1
            stage.devices[0].participant.message(at, old[0][1], retained=True)
            return True
        return False

    jobs = stage.devices[0].jobs
    stage.drop = swap
    stage.run(30.0)
    assert mixed > 0 and stage.refused()["wrong-chunk"] >= 1
    assert stage.devices[0].jobs == jobs
    stage.drop = lambda parcel: False
    stage.run_until(lambda: stage.devices[0].jobs > jobs)


def test_a_descriptor_of_a_lower_serial_is_refused(stage: Stage) -> None:
    topic = stage.topics.write(DescriptorTopic())
    old = stage.broker.retained[topic]
    assert stage.command("rotate", "keys") == 0
    stage.next_version()
    new = stage.devices[0].participant.sessions.descriptor
    assert new is not None and new.message == stage.broker.retained[topic] != old
    stage.broker.publish(topic, old, retain=True)
    stage.settle()
    assert stage.refused()["serial-fell"] == 1
    stage.devices[0].restart()
    stage.settle()
    kept = stage.devices[0].participant.sessions.descriptor
    assert kept == new


def test_a_descriptor_or_presence_of_another_root_is_refused(stage: Stage) -> None:
    forged = bytearray(stage.broker.retained[stage.topics.write(DescriptorTopic())])
    forged[3:35] = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    stage.broker.publish(stage.topics.write(DescriptorTopic()), bytes(forged), retain=True)
    presence = bytearray(stage.broker.retained[stage.topics.write(PresenceTopic())])
    presence[-1] ^= 1
    stage.broker.publish(stage.topics.write(PresenceTopic()), bytes(presence), retain=True)
    stage.settle()
    assert stage.refused()["wrong-root"] == 1
    assert stage.refused()["bad-signature"] == 1
    stage.next_version()


def test_an_old_presence_shown_again_causes_no_loop_of_opens(stage: Stage) -> None:
    topic = stage.topics.write(PresenceTopic())
    old = stage.broker.retained[topic]
    stage.kill_aggregator()
    stage.now_seconds += 10.0
    stage.start_aggregator()
    stage.next_version()
    stage.run(30.0)
    opened = [device.participant.sessions.opened for device in stage.devices]
    for _ in range(10):
        stage.broker.publish(topic, old, retain=True)
        stage.run(5.0)
    assert [device.participant.sessions.opened for device in stage.devices] == opened


def test_the_tasks_are_told_before_each_presence_under_its_keys_and_of_its_life(
    stage: Stage,
) -> None:
    """At the start, after a restart of the broker, when shown again, and with new keys."""
    tasks, presence = stage.topics.write(TasksTopic()), stage.topics.write(PresenceTopic())
    stage.next_version()
    stage.link.disconnect()
    stage.link.connect()
    stage.next_version()
    stage.now_seconds += 70.0
    stage.service._show_presence_again()
    assert stage.command("rotate", "keys") == 0
    stage.next_version()
    stage.restart_aggregator()
    stage.next_version()
    standing = [each for each in stage.broker.seen if each[0] in (tasks, presence)]
    assert [topic for topic, _ in standing] == [tasks, presence] * (len(standing) // 2)
    assert len(standing) >= 10
    descriptor = stage.parts.keys.current().descriptor
    served = read_announcement(ServedTasks, standing[-2][1], descriptor)
    assert served.names == (("default", "all"),)
    presence = read_announcement(Presence, standing[-1][1], descriptor)
    assert served.incarnation == presence.incarnation
    assert {stage.refused(place).get("bad-signature", 0) for place in range(3)} == {0}


def test_a_forged_or_an_old_list_of_tasks_alarms_nobody(stage: Stage) -> None:
    topic = stage.topics.write(TasksTopic())
    of_an_earlier_life = stage.broker.retained[topic]
    stage.kill_aggregator()
    stage.now_seconds += 10.0
    stage.start_aggregator()
    stage.next_version()
    keys, life = stage.parts.keys.current(), stage.incarnation()
    served = ServedTasks(life, 9, (("films", "all"),))
    forged = announce(served, keys.descriptor, Ed25519PrivateKey.generate())
    for message in (forged, of_an_earlier_life, b""):
        stage.broker.publish(topic, message, retain=True)
        stage.settle()
        assert [each.participant.problem for each in stage.devices] == [""] * len(stage.devices)
    assert stage.refused()["bad-signature"] == 1 and stage.refused()["truncated"] == 1
    # What the aggregator itself signed would be believed: the test can tell.
    true = announce(served, keys.descriptor, keys.signing)
    stage.broker.publish(topic, true, retain=True)
    stage.settle()
    assert all("serves no task" in each.participant.problem for each in stage.devices)
    stage.next_version()


def _forge(
    stage: Stage, key: GroupKey, signing: Ed25519PrivateKey, **changed: object
) -> list[tuple[str, bytes]]:
    """A whole broadcast for the next round by somebody who knows the group key.

    ``changed``: fields of the manifest that tell something else than the round in hand.
    """
    real = _open(stage, _manifests(stage)[-1], key)
    publication = Publication(key, "default", "all")
    chunks, digests = seal_chunks(publication, os.urandom(2000))
    manifest = replace(
        real,
        round=real.round + 1,
        version=real.version + 1,
        broadcast_id=publication.broadcast_id,
        key_epoch=key.epoch,
        length=2000,
        chunks=digests,
    )
    manifest = replace(manifest, **changed)  # type: ignore[arg-type]
    sealed = publication.seal_manifest(encode(manifest), signing)
    named = [
        (stage.topics.write(ChunkTopic(publication.broadcast_id, index)), chunk)
        for index, chunk in enumerate(chunks)
    ]
    return [*named, (_manifest_topic(stage), sealed)]


def test_a_broadcast_forged_by_a_device_with_the_group_key_is_refused(stage: Stage) -> None:
    jobs = stage.devices[0].jobs
    (key,) = stage.parts.keys.group_keys()
    for topic, message in _forge(stage, key, Ed25519PrivateKey.generate()):
        stage.broker.publish(topic, message, retain=True)
    stage.settle()
    assert stage.refused()["bad-signature"] >= 1
    assert stage.devices[0].jobs == jobs
    stage.next_version()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"task": "another"}, "wrong-manifest"),
        ({"cohort": "another"}, "wrong-manifest"),
        ({"key_epoch": 77}, "wrong-manifest"),
        ({"broadcast_id": bytes(32)}, "wrong-manifest"),
        ({"root_fingerprint": bytes(16)}, "wrong-root"),
        ({"opened_unix_seconds": 9, "deadline_unix_seconds": 9}, "expired-manifest"),
    ],
)
def test_a_signed_manifest_that_says_something_else_inside_is_refused(
    stage: Stage, changed: dict[str, object], reason: str
) -> None:
    stage.run_until(lambda: stage.parts.first.rounds.current is None)
    jobs = stage.devices[0].jobs
    (key,) = stage.parts.keys.group_keys()
    signing = stage.parts.keys.current().signing
    for topic, message in _forge(stage, key, signing, **changed):
        stage.broker.publish(topic, message, retain=True)
    stage.settle()
    assert stage.refused().get(reason) == 1
    assert stage.devices[0].jobs == jobs
    stage.next_version()  # the same number, by the aggregator: nothing of the other one was kept
    assert stage.devices[0].jobs == jobs + 1


def test_a_round_does_not_wait_for_a_revoked_device(make_stage: MakeStage) -> None:
    stage = make_stage(round_lines="quorum = 2\nleast_deadline_seconds = 300\npause_seconds = 5")
    stage.next_version()
    number = stage.parts.store.first.rounds.latest()[0].round + 1
    stage.drop = lambda parcel: parcel.topic == stage.up_topic(0)
    stage.run_until(lambda: stage.verdict(1, number) == stage.verdict(2, number) == "counted")
    stage.run(30.0)
    assert stage.parts.first.rounds.outstanding == 1
    assert stage.command("revoke", stage.devices[0].grant.device_id.hex()) == 0
    stage.settle()
    assert stage.version == number


def test_what_a_revoked_device_shared_is_handed_on_no_more(make_stage: MakeStage) -> None:
    forgotten: list[tuple[str, int]] = []

    class Remembering(KnownSums):
        def forget(self, sender: str) -> None:
            forgotten.append((sender, self.version))

    class Binding(KnownBinding):
        def build(
            self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
        ) -> Method:
            return Remembering(np.zeros((items, self.settings.columns), np.float32), self.settings)

    stage = make_stage(
        binding=Binding(), round_lines="quorum = 2\ndeadline_seconds = 60\npause_seconds = 5"
    )
    stage.next_version()
    assert forgotten == []
    revoked = stage.devices[0].grant.device_id.hex()
    assert stage.command("revoke", revoked) == 0
    stage.next_version()
    stage.restart_aggregator()
    stage.next_version()
    assert forgotten == [(revoked, 2), (revoked, 3)]


def test_a_chunk_forged_by_a_device_with_the_group_key_is_refused(stage: Stage) -> None:
    (key,) = stage.parts.keys.group_keys()
    done = 0

    def forge(parcel: Parcel) -> bool:
        nonlocal done
        at, payload = parcel.topic, parcel.payload
        if "/chunk/" not in at or payload[:2] != b"\x01\x08" or parcel.to != "device-0":
            return False
        done += 1
        keys = derive_broadcast_keys(key, payload[6:38], "default", "all")
        head = payload[:38]
        nonce = int.from_bytes(payload[2:6], "little").to_bytes(12, "little")
        forged = head + ChaCha20Poly1305(keys.chunks).encrypt(nonce, os.urandom(500), head)
        stage.devices[0].participant.message(at, forged, retained=True)
        return True

    stage.drop = forge
    jobs = stage.devices[0].jobs
    stage.run(20.0)
    assert done and stage.refused()["wrong-chunk"] >= 1
    assert stage.devices[0].jobs == jobs


def test_a_broadcast_of_an_old_epoch_is_refused(stage: Stage) -> None:
    old_manifest = _manifests(stage)[-1]
    (old_key,) = stage.parts.keys.group_keys()
    assert stage.command("rotate", "group") == 0
    stage.next_version()
    stage.next_version()
    epochs = [key.epoch for key in stage.parts.keys.group_keys()]
    assert epochs[-1] == old_key.epoch + 1 and old_key.epoch not in epochs
    jobs, before = stage.devices[0].jobs, stage.refused()["unknown-epoch"]
    stage.broker.publish(_manifest_topic(stage), old_manifest, retain=True)
    # One made anew under the old key, signed by the aggregator's own key even.
    signing = stage.parts.keys.current().signing
    publication = Publication(old_key, "default", "all")
    real = _open(stage, _manifests(stage)[-2], stage.parts.keys.group_keys()[-1])
    newer = replace(
        real, round=real.round + 1, key_epoch=old_key.epoch, broadcast_id=publication.broadcast_id
    )
    forged = publication.seal_manifest(encode(newer), signing)
    stage.broker.publish(_manifest_topic(stage), forged, retain=True)
    stage.settle()
    # The session that a device opened because of the rotation told it the new key alone.
    assert stage.refused()["unknown-epoch"] == before + 2
    assert stage.devices[0].jobs == jobs


def test_revocation_in_the_middle_of_a_round(make_stage: MakeStage) -> None:
    stage = make_stage(round_lines="quorum = 2\ndeadline_seconds = 60\npause_seconds = 5")
    stage.next_version()
    stage.run(1.0)
    stage.drop = lambda parcel: parcel.topic == stage.up_topic(1)
    number = stage.parts.store.first.rounds.latest()[0].round + 1
    stage.run_until(lambda: stage.verdict(0, number) == "counted")
    revoked = stage.devices[0].grant.device_id
    assert stage.command("revoke", revoked.hex()) == 0
    stage.settle()
    assert not stage.parts.table.has_session(revoked)
    stage.broker.publish(stage.up_topic(0), stage.sent_up(0)[-1])
    stage.settle()
    assert stage.refusals("revoked") >= 1
    stage.drop = lambda parcel: False
    jobs = stage.devices[0].jobs
    old_epoch = stage.parts.keys.group_keys()[-1].epoch
    stage.next_version()  # what it sent before is part of it
    stage.next_version()
    assert stage.parts.keys.group_keys()[-1].epoch == old_epoch + 1
    assert stage.devices[0].jobs == jobs
    assert stage.refused()["unknown-epoch"] >= 1
    assert (
        stage.parts.first.rounds.current is None or stage.parts.first.rounds.current.expected == 2
    )
