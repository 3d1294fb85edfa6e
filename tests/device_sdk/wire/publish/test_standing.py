"""A device's standing: what is written is read, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import strategies as st

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode
from device_sdk.wire.publish.receipts import RecordType
from device_sdk.wire.publish.task_messages import (
    MOST_LABELS,
    MOST_TASKS,
    Standing,
    require_labels,
)
from tests.vectors import generate_codecs as vectors

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?", fullmatch=True)
VALUES = st.text(min_size=1, max_size=16)


def test_the_vector_is_what_is_written() -> None:
    stored = json.loads(vectors.FILE.read_text(encoding="utf-8"))["standing"]
    assert stored["type"] == RecordType.STANDING == 19
    standing = decode(Standing, bytes.fromhex(stored["payload"]))
    assert dict(standing.labels) == stored["labels"]
    assert [list(each) for each in standing.tasks] == stored["tasks"]


@pytest.mark.parametrize(
    "value",
    [
        {"labels": [], "tasks": []},
        {"labels": {"site": 3}, "tasks": []},
        {"labels": {"site": ""}, "tasks": []},
        {"labels": {"site": "x" * 65}, "tasks": []},
        {"labels": {"Site": "x"}, "tasks": []},
        {"labels": {f"l{n}": "x" for n in range(MOST_LABELS + 1)}, "tasks": []},
        {"labels": {}, "tasks": [{"task": "a", "cohort": "all"}] * 2},
        {"labels": {}, "tasks": [{"task": "b", "cohort": "c"}, {"task": "a", "cohort": "c"}]},
        {"labels": {}, "tasks": [{"task": "A", "cohort": "all"}]},
        {"labels": {}, "tasks": [{"task": "a"}]},
        {"labels": {}, "tasks": [{"task": f"{n:03}", "cohort": "c"} for n in range(257)]},
        {"labels": {}},
    ],
    ids=str,
)
def test_what_is_no_standing_is_refused(value: dict[str, cbor.CborValue]) -> None:
    with pytest.raises(WireError):
        decode(Standing, cbor.encode(value))


def test_what_cannot_be_said_is_not_written() -> None:
    for labels, tasks in (
        ({"Site": "x"}, ()),
        ({"site": ""}, ()),
        ({}, (("b", "all"), ("a", "all"))),
        ({}, tuple((f"{n:03}", "all") for n in range(MOST_TASKS + 1))),
    ):
        with pytest.raises(ValueError, match=r"site|Site|order|tasks"):
            Standing(labels, tasks)
    with pytest.raises(ValueError, match="33 entries"):
        require_labels({f"l{n}": "x" for n in range(33)})
