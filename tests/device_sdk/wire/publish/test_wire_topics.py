from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    DownTopic,
    EnrolAnswerTopic,
    EnrolRequestTopic,
    ManifestTopic,
    PresenceTopic,
    TasksTopic,
    Topic,
    Topics,
    UpTopic,
)

HANDLES = st.binary(min_size=16, max_size=16)
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?", fullmatch=True)
ANY = st.one_of(
    st.builds(UpTopic, st.integers(0, 65_535), HANDLES),
    st.builds(DownTopic, HANDLES),
    st.builds(DescriptorTopic),
    st.builds(PresenceTopic),
    st.builds(TasksTopic),
    st.builds(ManifestTopic, NAMES, NAMES),
    st.builds(ChunkTopic, st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1)),
    st.builds(EnrolRequestTopic),
    st.builds(EnrolAnswerTopic, HANDLES),
)
LEVELS = st.sampled_from(
    [
        "up",
        "down",
        "all",
        "enrol",
        "0",
        "00",
        "1",
        "65536",
        "+",
        "#",
        "",
        "chunk",
        "manifest",
        "descriptor",
        "presence",
        "tasks",
        "request",
        "answer",
        "films",
        "a" * 32,
        "A" * 32,
        "b" * 64,
        "\u0661",
    ]
)


@given(ANY, st.sampled_from(["tessera", "site-1/tessera"]))
def test_round_trip(topic: Topic, prefix: str) -> None:
    topics = Topics(prefix)
    assert topics.parse(topics.write(topic)) == topic


@given(st.one_of(st.text(), st.lists(LEVELS, max_size=6).map(lambda x: "/".join(["t", *x]))))
def test_any_text_is_refused_or_the_one_spelling(text: str) -> None:
    topics = Topics("t")
    try:
        topic = topics.parse(text)
    except WireError as error:
        assert error.reason == "bad-topic"
        return
    assert topics.write(topic) == text


@pytest.mark.parametrize(
    "prefix", ["", "/a", "a/", "a//b", "$SYS", "a/#", "+", "a b", "ä", "a\n", "x" * 129, "-a"]
)
def test_bad_prefixes_are_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        Topics(prefix)


def test_filters_cover_what_they_should() -> None:
    topics = Topics()
    assert topics.write(UpTopic(0, bytes(16))).startswith(topics.up_filter(0)[:-1])
    assert topics.write(ChunkTopic(bytes(32), 1)) == topics.chunk_filter(bytes(32))[:-1] + "1"


@pytest.mark.parametrize(
    "topic",
    [
        UpTopic(65_536, bytes(16)),
        UpTopic(-1, bytes(16)),
        DownTopic(bytes(15)),
        ManifestTopic("a/b", "all"),
        ManifestTopic("a", "#"),
        ChunkTopic(bytes(31), 0),
        ChunkTopic(bytes(32), -1),
        EnrolAnswerTopic(b""),
    ],
)
def test_topics_that_do_not_exist_cannot_be_written(topic: Topic) -> None:
    with pytest.raises(ValueError, match=r"expected|bytes"):
        Topics().write(topic)
