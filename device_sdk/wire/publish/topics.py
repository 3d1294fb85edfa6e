"""Every topic: built here, parsed here, nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import is_name, require_name

MOST_PREFIX_BYTES = 128
MOST_SHARDS = 65_536
MOST_CHUNK_INDEX = 2**32 - 1
_LEVEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HANDLE = re.compile(r"[0-9a-f]{32}")
_CONTENT = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class UpTopic:
    """From one device: session opens and envelopes."""

    shard: int
    handle: bytes


@dataclass(frozen=True, slots=True)
class DownTopic:
    """To one device: session replies and envelopes."""

    handle: bytes


@dataclass(frozen=True, slots=True)
class DescriptorTopic:
    """The retained descriptor."""


@dataclass(frozen=True, slots=True)
class PresenceTopic:
    """The retained presence."""


@dataclass(frozen=True, slots=True)
class TasksTopic:
    """The retained list of the tasks that are served."""


@dataclass(frozen=True, slots=True)
class SuccessorTopic:
    """The retained word on the broker that takes this one's place."""


@dataclass(frozen=True, slots=True)
class ProbeTopic:
    """From the aggregator to itself, to see whether the broker delivers."""


@dataclass(frozen=True, slots=True)
class ManifestTopic:
    """The retained manifest of a task for a cohort."""

    task: str
    cohort: str


@dataclass(frozen=True, slots=True)
class ChunkTopic:
    """A retained chunk of a broadcast, an artifact or a catalogue, by the content's 32-byte id."""

    content_id: bytes
    index: int


@dataclass(frozen=True, slots=True)
class EnrolRequestTopic:
    """Enrolment requests of all devices-to-be."""


@dataclass(frozen=True, slots=True)
class EnrolAnswerTopic:
    """The answer to one request, at the random mailbox that the request names."""

    mailbox: bytes


Topic = (
    UpTopic
    | DownTopic
    | DescriptorTopic
    | PresenceTopic
    | TasksTopic
    | SuccessorTopic
    | ProbeTopic
    | ManifestTopic
    | ChunkTopic
    | EnrolRequestTopic
    | EnrolAnswerTopic
)


class Topics:
    """The topics below one prefix.

    ``prefix``: one or more levels of letters, digits, '.', '_' and '-', at most 128 bytes in all.
    Raises ValueError for any other: wildcards and '$' would reach into others' topics.
    """

    def __init__(self, prefix: str = "tessera") -> None:
        levels = prefix.split("/")
        if len(prefix) > MOST_PREFIX_BYTES or not all(_LEVEL.fullmatch(each) for each in levels):
            raise ValueError(
                f"topic prefix {prefix!r} is not usable; expected such as 'tessera' or "
                "'site-1/tessera': levels of letters, digits, '.', '_' and '-'"
            )
        self.prefix = prefix
        self._up = re.compile(rf"{re.escape(prefix)}/up/(0|[1-9][0-9]{{0,4}})/([0-9a-f]{{32}})")

    def write(self, topic: Topic) -> str:
        """The topic's text. Raises ValueError for ids, names or numbers that do not fit."""
        return f"{self.prefix}/{_tail(topic)}"

    def up_filter(self, shard: int | None = None) -> str:
        """Subscribes an aggregator to a shard's devices; None: to those of all shards."""
        if shard is None:
            return f"{self.prefix}/up/+/+"
        _require_number("shard", shard, MOST_SHARDS - 1)
        return f"{self.prefix}/up/{shard}/+"

    def chunk_filter(self, content_id: bytes) -> str:
        """Subscribes a device to all chunks of a content."""
        return f"{self.prefix}/all/chunk/{_hex('content id', content_id, 32)}/+"

    def parse(self, text: str) -> Topic:
        """What ``text`` is. Raises ``WireError("bad-topic")``: each topic has one spelling."""
        # What devices send comes first: an aggregator parses one for each message.
        up = self._up.fullmatch(text)
        if up is not None:
            shard, handle = up.groups()
            if (number := int(shard)) < MOST_SHARDS:
                return UpTopic(number, bytes.fromhex(handle))
        head = f"{self.prefix}/"
        if text.startswith(head):
            match text[len(head) :].split("/"):
                case ["down", handle] if _HANDLE.fullmatch(handle):
                    return DownTopic(bytes.fromhex(handle))
                case ["all", "descriptor"]:
                    return DescriptorTopic()
                case ["all", "presence"]:
                    return PresenceTopic()
                case ["all", "tasks"]:
                    return TasksTopic()
                case ["all", "successor"]:
                    return SuccessorTopic()
                case ["all", "probe"]:
                    return ProbeTopic()
                case ["all", "manifest", task, cohort] if is_name(task) and is_name(cohort):
                    return ManifestTopic(task, cohort)
                case ["all", "chunk", content, index] if _CONTENT.fullmatch(content):
                    if _NUMBER.fullmatch(index) and int(index) <= MOST_CHUNK_INDEX:
                        return ChunkTopic(bytes.fromhex(content), int(index))
                case ["enrol", "request"]:
                    return EnrolRequestTopic()
                case ["enrol", "answer", mailbox] if _HANDLE.fullmatch(mailbox):
                    return EnrolAnswerTopic(bytes.fromhex(mailbox))
        raise WireError("bad-topic", "not a topic of this protocol below this prefix")


def _tail(topic: Topic) -> str:
    match topic:
        case UpTopic(shard, handle):
            _require_number("shard", shard, MOST_SHARDS - 1)
            return f"up/{shard}/{_hex('handle', handle, 16)}"
        case DownTopic(handle):
            return f"down/{_hex('handle', handle, 16)}"
        case DescriptorTopic():
            return "all/descriptor"
        case PresenceTopic():
            return "all/presence"
        case TasksTopic():
            return "all/tasks"
        case SuccessorTopic():
            return "all/successor"
        case ProbeTopic():
            return "all/probe"
        case ManifestTopic(task, cohort):
            require_name("task", task)
            require_name("cohort", cohort)
            return f"all/manifest/{task}/{cohort}"
        case ChunkTopic(content_id, index):
            _require_number("chunk index", index, MOST_CHUNK_INDEX)
            return f"all/chunk/{_hex('content id', content_id, 32)}/{index}"
        case EnrolRequestTopic():
            return "enrol/request"
        case EnrolAnswerTopic(mailbox):
            return f"enrol/answer/{_hex('mailbox', mailbox, 16)}"


def _hex(what: str, raw: bytes, size: int) -> str:
    if len(raw) != size:
        raise ValueError(f"a {what} has {size} bytes, {len(raw)} given")
    return raw.hex()


def _require_number(what: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{what} is {value}; expected 0 to {most}")
