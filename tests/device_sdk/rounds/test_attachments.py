"""A participant and what a round offers: fetched when wanted, once, by whom it is for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.home.round_store import RoundOutcome
from device_sdk.methods.learner import LearnerError
from device_sdk.rounds import Subscribe
from device_sdk.wire.arrays.exchange import Attachment
from device_sdk.wire.publish.content import ContentKind, seal_content
from device_sdk.wire.publish.task_messages import write_attachment
from device_sdk.wire.seal.broadcast import GroupKey, Publication, new_group_key
from device_sdk.world import TrainingOptions
from tests.fakes.in_memory import Bench

PUBLIC = Attachment({"x": np.arange(60_000, dtype=np.float32)[:40_000]})
VECTOR = Attachment({"w": np.linspace(0, 1, 8, dtype=np.float32)}, "near")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path / "home")
    made.aggregator.attachments = {"public.a": PUBLIC, "vector.a": VECTOR}
    made.aggregator.members = {"near": [admission_key(made)]}
    return made


def admission_key(bench: Bench) -> bytes:
    membership = bench.home.membership.load()
    return membership.grant.admission_key


def last_outcome(bench: Bench) -> RoundOutcome | None:
    last = bench.home.rounds.last()
    return None if last is None else last.outcome


def watch_subscriptions(bench: Bench) -> list[str]:
    """Topics that the device subscribes to from now on."""
    seen: list[str] = []
    subscribe = bench.broker.subscribe

    def noted(topic_filter: str) -> None:
        seen.append(topic_filter)
        subscribe(topic_filter)

    bench.broker.subscribe = noted  # type: ignore[method-assign]
    return seen


def content_topics(bench: Bench, subscribed: list[str]) -> set[str]:
    """Of the attachments, the contents that were subscribed to."""
    kept = {content_id.hex() for content_id in bench.home.attachments.ids("default")}
    return {topic.split("/")[-2] for topic in subscribed if topic.split("/")[-2] in kept}


def test_wanted_attachments_come_before_the_training(bench: Bench) -> None:
    bench.wanted = ["public.a", "vector.a"]
    bench.aggregator.open_round()
    bench.run(5)
    (question,), (job,) = bench.questions, bench.jobs
    sizes = question.broadcast.offered
    assert set(sizes) == {"public.a", "vector.a"} and sizes["public.a"] > 80_000
    assert not question.broadcast.attachments
    got = job.broadcast.attachments
    np.testing.assert_array_equal(
        got["public.a"].tensors["x"], PUBLIC.tensors["x"].astype(np.float16).astype(np.float32)
    )
    assert got["vector.a"].cohort == "near"
    np.testing.assert_allclose(got["vector.a"].tensors["w"], VECTOR.tensors["w"], atol=1e-3)
    assert len(bench.aggregator.seen.bodies) == 1
    assert bench.participant.refusals.counts() == {}


def test_what_is_not_wanted_is_not_fetched(bench: Bench) -> None:
    bench.aggregator.open_round()
    bench.run(5)
    assert len(bench.questions) == len(bench.jobs) == 1
    assert not bench.jobs[0].broadcast.attachments and not bench.home.attachments.ids("default")


def test_a_days_bytes_bound_attachments_too(tmp_path: Path) -> None:
    """Of a ladder they are the model: nothing else of a round is as large."""
    bench = Bench(tmp_path / "home", options=TrainingOptions(bytes_a_day=60_000))
    bench.aggregator.attachments = {"public.a": PUBLIC, "public.b": Attachment(VECTOR.tensors)}
    for wanted, outcome in ([["public.a"], "OVER_BUDGET"], [["public.b"], "TRAINED"]) * 2:
        bench.wanted = list(wanted)
        bench.aggregator.open_round()
        bench.run(5)
        assert last_outcome(bench) is RoundOutcome[outcome]
    (_, first), *_ = bench.home.rounds.concluded_after(0)
    assert "of this day's 60,000 bytes" in first.detail and "takes 80," in first.detail
    bench.participant.budget.save()
    assert bench.home.spent.so_far().bytes < 60_000


def test_others_attachments_are_not_even_offered(bench: Bench) -> None:
    bench.aggregator.members = {"near": [b"\x01" * 32]}
    bench.aggregator.open_round()
    bench.run(5)
    assert set(bench.questions[0].broadcast.offered) == {"public.a"}
    bench.aggregator.attachments = {"vector.a": VECTOR}
    bench.aggregator.open_round()
    bench.run(5)
    assert len(bench.questions) == 1 and len(bench.jobs) == 2  # nothing to ask about


def test_the_same_attachment_is_fetched_once_across_rounds_and_restarts(bench: Bench) -> None:
    bench.wanted = ["public.a", "vector.a"]
    bench.aggregator.open_round()
    bench.run(5)
    subscribed = watch_subscriptions(bench)
    bench.aggregator.open_round()
    bench.run(5)
    bench.restart()
    bench.aggregator.open_round()
    bench.run(20)
    assert len(bench.jobs) == 3 and len(bench.jobs[2].broadcast.attachments) == 2
    assert len(bench.home.attachments.ids("default")) == 2
    assert content_topics(bench, subscribed) == set()
    changed = Attachment({"w": VECTOR.tensors["w"] + 1}, "near")
    bench.aggregator.attachments["vector.a"] = changed
    bench.aggregator.open_round()
    bench.run(5)
    assert len(content_topics(bench, subscribed)) == 1
    np.testing.assert_allclose(
        bench.jobs[3].broadcast.attachments["vector.a"].tensors["w"],
        changed.tensors["w"],
        atol=1e-3,
    )
    # What is no longer offered is not kept.
    assert len(bench.home.attachments.ids("default")) == 2
    bench.aggregator.attachments = {"public.a": PUBLIC}
    bench.aggregator.open_round()
    bench.wanted = []
    bench.run(5)
    assert len(bench.home.attachments.ids("default")) == 1


def test_a_restart_in_the_middle_of_a_fetch_takes_the_round_up_again(bench: Bench) -> None:
    bench.wanted = ["public.a"]
    bench.aggregator.open_round()
    late = {t: m for t, m in bench.broker.retained.items() if t.endswith("/2")}
    for topic in late:
        del bench.broker.retained[topic]  # the second chunk of what is long
    bench.run(5)
    assert bench.questions and not bench.jobs
    bench.broker.retained.update(late)
    bench.restart()
    bench.run(20)
    assert len(bench.questions) == 2 and len(bench.jobs) == 1
    assert len(bench.aggregator.seen.bodies) == 1


def test_a_fetch_that_does_not_end_in_time_ends_the_round(bench: Bench) -> None:
    bench.wanted = ["public.a"]
    bench.aggregator.open_round(deadline_seconds=60)
    for topic in [t for t in bench.broker.retained if t.endswith("/1")]:
        del bench.broker.retained[topic]  # chunk 0 of every content
    bench.run(90)
    assert last_outcome(bench) is RoundOutcome.TOO_LATE and not bench.jobs
    assert bench.participant.rounds["default"].question is None


def test_a_cohorts_content_under_another_key_is_refused(bench: Bench) -> None:
    bench.wanted = ["vector.a"]
    right, bench.aggregator.cohort_key = bench.aggregator.cohort_key, b"\xc1" * 32
    bench.aggregator.open_round(deadline_seconds=30)
    heads = {t: m for t, m in bench.broker.retained.items() if "/chunk/" in t}
    bench.aggregator.cohort_key = right
    bench.aggregator.open_round(deadline_seconds=30)
    bench.broker.retained.update(heads)  # as a broker would that shows an older publication
    bench.run(40)
    assert bench.participant.refusals.counts().get("bad-tag", 0) >= 1
    assert last_outcome(bench) is RoundOutcome.TOO_LATE and not bench.jobs


def content_of(bench: Bench, name: str) -> dict[str, bytes]:
    """The retained messages of an attachment, by their topics."""
    attachment = bench.aggregator.attachments[name]
    offered = bench.aggregator._publish_attachment(name, attachment, bench.aggregator._signing)
    part = f"/{offered.content_id.hex()}/"
    return {at: message for at, message in bench.broker.retained.items() if part in at}


@pytest.mark.parametrize("name", ["public.a", "vector.a"])
def test_an_attachment_forged_by_one_of_its_readers_is_refused(bench: Bench, name: str) -> None:
    bench.wanted = [name]
    bench.aggregator.open_round()
    real = content_of(bench, name)
    # Who may read it knows its key, and so could seal other arrays under its name.
    topic, *_ = sorted(real)
    content_id = bytes.fromhex(topic.split("/")[-2])
    cohort = bench.aggregator.attachments[name].cohort
    epoch, key = bench.aggregator.group_keys[-1].epoch, bench.aggregator.group_keys[-1].key
    known = GroupKey(epoch, bench.aggregator.cohort_key if cohort else key)
    forged = seal_content(
        Publication(known, "default", cohort or "all"),
        Ed25519PrivateKey.generate(),
        ContentKind.ATTACHMENT,
        content_id,
        write_attachment(Attachment({"w": np.full(8, 9, np.float32)}), "float16"),
    )
    for at in real:
        del bench.broker.retained[at]
    prefix = topic.rsplit("/", 1)[0]
    bench.broker.retained |= {f"{prefix}/{place}": each for place, each in enumerate(forged)}
    bench.run(5)
    assert bench.participant.refusals.counts().get("bad-signature", 0) >= 1 and not bench.jobs
    bench.broker.retained |= real
    bench.run(40)
    (job,) = bench.jobs
    assert set(job.broadcast.attachments[name].tensors) == set(
        bench.aggregator.attachments[name].tensors
    )


def test_one_attachment_shown_in_the_place_of_another_is_refused(bench: Bench) -> None:
    bench.aggregator.attachments["public.b"] = Attachment({"x": np.ones(3, np.float32)})
    bench.wanted = ["public.b"]
    bench.aggregator.open_round()
    here, other = content_of(bench, "public.b"), content_of(bench, "public.a")
    moved = dict(zip(sorted(here), (other[at] for at in sorted(other)), strict=False))
    bench.broker.retained |= moved
    bench.run(5)
    assert bench.participant.refusals.counts().get("wrong-content", 0) >= 1 and not bench.jobs
    bench.broker.retained |= here
    bench.run(40)
    assert len(bench.jobs) == 1


def test_a_rotated_group_key_reaches_attachments_too(bench: Bench) -> None:
    bench.wanted = ["public.a", "vector.a"]
    bench.aggregator.open_round()
    bench.run(5)
    bench.aggregator.group_keys = (new_group_key(2),)
    bench.aggregator.attachments["public.b"] = Attachment({"x": np.ones(3, np.float32)})
    bench.wanted = ["public.b"]
    bench.aggregator.open_round()
    bench.run(60)
    assert len(bench.jobs) == 2 and set(bench.jobs[1].broadcast.attachments) == {"public.b"}


def test_a_learner_may_want_only_what_is_offered(bench: Bench) -> None:
    bench.wanted = ["secret.a"]
    bench.aggregator.open_round()
    with pytest.raises(LearnerError, match=r"wants 'secret.a', which is not offered"):
        bench.run(5)


def test_subscriptions_of_a_round_end_with_it(bench: Bench) -> None:
    bench.wanted = ["public.a", "vector.a"]
    before = set(bench.broker.filters)
    bench.aggregator.open_round()
    bench.run(5)
    standing = {each for each in bench.broker.filters if "/chunk/" not in each}
    assert bench.broker.filters == standing and before <= standing
    assert not any(isinstance(action, Subscribe) for action in bench.participant.actions)
