"""What an aggregator logs: each line is of one of these events, and about a task or none."""

from __future__ import annotations

import logging
import math
import re
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, unique
from logging import ERROR, INFO, WARNING

from device_sdk.system.printable import printable, span

_LOG = logging.getLogger("aggregator")


@unique
class LogEvent(Enum):
    """Level, text and meaning of each. Its name is for programs, and stays what it is.

    The text's ``{fields}`` are what :meth:`log` takes. What stands in brackets is left out where
    one of its fields is empty. ``{seconds:span}`` says a time in words; ``{reason:unsaid}`` is for
    programs alone.
    """

    # serve itself
    STARTED = (
        INFO,
        "Tessera {release} serves {home} over {broker}: {tasks}",
        "`serve` has begun, with these tasks",
    )
    STOPPED = (INFO, "stopped", "`serve` has ended, as it was asked to")
    FAILED = (ERROR, "{problem}", "`serve` has ended; with `--log json` only, else it is printed")
    BROKER_CHANGES = (
        INFO,
        "the fleet's broker is to be another one, or two: connecting anew",
        "the fleet moves, or stays: `broker`",
    )
    CLOCK_SET = (WARNING, "{problem}", "this machine's calendar jumped")
    CLOCK_FOLLOWED = (
        WARNING,
        "rounds go by the clock's new time from now on: {now}",
        "it has kept to its new time for a minute",
    )
    CLOCK_BEHIND = (
        WARNING,
        "this machine's clock says {now}, but this fleet was served at {last} already: it was "
        "ahead then, or lies behind now. Rounds go on either way; make sure that the clock is "
        "right",
        "the clock was wrong at the last start, or is now",
    )
    METHOD_SLOW = (
        WARNING,
        "a method's {call} has run for {seconds:.0f} s, and nothing else is served meanwhile; it "
        "is ended after {most_seconds:.0f} s",
        "a method's code takes long",
    )
    ACTION_UNNOTED = (
        WARNING,
        "{action} by {actor} ({outcome}) is not in {file}, which cannot be written: {problem}",
        "the audit log lacks what was done",
    )
    METRICS_FAIL = (
        ERROR,
        "a question to metrics.port could not be answered",
        "a mistake of the port's own, and its traceback; whoever asked is told so",
    )
    # the console beside it
    CONSOLE_SAID = (INFO, "console: {text}", "a line of the console's own")
    CONSOLE_ENDED = (
        WARNING,
        "the console ended: {problem}. serve goes on, and starts it again",
        "the problem `console-away`",
    )
    CONSOLE_FAILS = (
        ERROR,
        "{what} failed",
        "a mistake of the console's; the page says so, and the traceback where it is",
    )
    CERTIFICATE_KEPT = (
        WARNING,
        "the certificate of before is used on: {problem}",
        "the console's certificate was renewed by one that is none",
    )
    # the store
    STORE_AWAY = (
        WARNING,
        "the store is away: {problem}. Nothing is lost; serve waits for it",
        "look at the database server",
    )
    STORE_SILENT = (WARNING, "{problem}. It is waited for", "the database server hangs")
    STORE_FAILS = (WARNING, "the store: {problem}", "a worker tries again")
    STORE_BACK = (INFO, "the store is there again, after {seconds:span}", "`serve` goes on")
    STORE_LEFT = (
        WARNING,
        "it ends without its store: what is not committed comes again",
        "`serve` was asked to end while the store was away",
    )
    STORE_UNUSED = (WARNING, "{problem}", "the task file names a database that is not in use")
    # the broker
    CONNECTED = (INFO, "connected to {broker}", "devices are heard and answered")
    DISCONNECTED = (
        WARNING,
        "no connection to {broker} ({problem}); next try in {retry_seconds:.1f} s",
        "devices wait, and nothing is lost",
    )
    CONNECTION_ENDED = (
        WARNING,
        "{effect}: a connection to {broker} ended ({problem}); next try in {retry_seconds:.1f} s",
        "one of `serve`'s three connections",
    )
    BROKER_NARROW = (
        WARNING,
        "{broker} takes {messages} of our messages before it wants to have acknowledged the "
        "first: sessions' replies and publications leave no faster than that each round trip; in "
        "mosquitto.conf, max_inflight_messages 1000, and max_queued_messages 10000 (logged once)",
        "a setting of the broker slows `serve`",
    )
    BROKER_DROPS_LARGE = (
        WARNING,
        "{broker} acknowledges messages of more than about {bytes} bytes and drops them: what is "
        "published and sent is cut to that. Where its settings limit messages for nothing, have "
        "it take {wanted_bytes} bytes (in mosquitto.conf, max_packet_size in the place of "
        "message_size_limit)",
        "a limit that it does not tell",
    )
    BROKER_DROPS = (
        WARNING,
        "{broker} acknowledges messages and does not deliver them, devices' updates too: it drops "
        "what does not fit into its queue for a connection; in mosquitto.conf, "
        "max_queued_messages 10000 (logged once; counted in the metrics as "
        "tessera_broker_losses_total)",
        "the problem `broker-drops`",
    )
    SUBSCRIPTION_GRANTED = (
        INFO,
        "the broker has granted the subscription to {topic}",
        "one that it refused before",
    )
    SUBSCRIPTION_REFUSED = (
        WARNING,
        "the broker refused the subscription to {topic} ({problem}); next try in "
        "{retry_seconds:.1f} s",
        "its rules lack a right of `aggregator/acl.template`",
    )
    SUBSCRIPTIONS_GRANTED = (
        INFO,
        "the broker has granted all subscriptions",
        "a worker's, of which it refused some before",
    )
    SUBSCRIPTIONS_REFUSED = (
        WARNING,
        "the broker refuses {count} of this worker's subscriptions, {topic} first ({problem}): "
        "the devices of these shards are not heard. They are asked for again after waits that "
        "grow; give this user the rights of aggregator/acl.template",
        "likewise, of a cluster's worker",
    )
    MESSAGE_REFUSED = (
        ERROR,
        "the broker refused a message to {topic}: {problem}",
        "its rules, or its limits",
    )
    MESSAGE_DOUBTED = (
        WARNING,
        "the broker acknowledged {topic} after {seconds:.1f} s without a word, and may not have "
        "retained it: sent again",
        "the broker is behind",
    )
    CHUNKS_UNWRITTEN = (
        WARNING,
        "chunks cannot be written to {place} (cluster.chunk_store): {problem}; {advice}, and it is "
        "tried again",
        "the problem `chunk-store`",
    )
    CHUNKS_WRITTEN = (INFO, "chunks can be written to {place} again", "it is over")
    # devices
    ENROLLED = (INFO, "enrolled {device}", "a device has joined")
    CODE_LEAKED = (
        WARNING,
        "the code of {device} was tried by another key, {key:.16}...",
        "the problem `code-leaked`",
    )
    LEFT = (INFO, "{device} has left", "a device gave its place up")
    REVOKED = (INFO, "revoked {device}: its sessions have ended", "it was sent away for good")
    IDENTITY_COPIED = (
        WARNING,
        "two machines have the identity of device {device}: its home was copied. Only one of them "
        "counts in a round. Enrol one again (invite), or remove both (revoke)",
        "the problem `two-machines`",
    )
    REFUSED = (
        WARNING,
        "refused from {sender}: {problem} (logged once){reason:unsaid}",
        "what came was not usable; once for each reason and sender",
    )
    SESSIONS_UNKNOWN = (
        INFO,
        "devices went on with sessions that are not open here, as after each start of serve: they "
        "are told, and open new ones (logged once)",
        "nothing to look into",
    )
    # tasks
    TASK_SERVED = (INFO, "the task is served", "it was added")
    TASK_CHANGED = (INFO, "the settings of the task file are in use", "it was edited")
    TASK_PAUSED = (INFO, "the task is paused: no further round opens", "`task pause`")
    TASK_RESUMED = (INFO, "the task is resumed: rounds open again", "`task resume`")
    TASK_REPLACED = (INFO, "the task was replaced: generation {generation}", "`task replace`")
    TASK_RETIRED = (INFO, "the task is retired", "its model and its rounds are deleted")
    TASK_NOTED = (WARNING, "{note}", "its file is served, and may not be what is meant")
    TASK_WAITS = (WARNING, "{problem}", "a part of its file is not in use yet")
    TASK_REFUSED = (ERROR, "{problem}", "the problem `task-refused`")
    TASK_HELD = (
        ERROR,
        "the task is held, and no other: {why}",
        "its method's code failed; a traceback comes with it",
    )
    TASK_FILE_UNWRITTEN = (ERROR, "{problem}", "it is written when it can be")
    PARAMETERS_ANEW = (WARNING, "{problem}", "a replaced task begins without them")
    UPDATES_DROPPED = (
        WARNING,
        "{count} updates that were counted are part of no version: they were made for the model "
        "that was replaced",
        "`task replace --now`",
    )
    CATALOGUE_REFUSED = (
        ERROR,
        "the catalogue stays as it was: {problem}",
        "mend its file; rounds go on",
    )
    CATALOGUE_WAITS = (
        INFO,
        "the catalogue has {items} items, the model {model_items}: the new ones are taken in "
        "before the first round that begins without waiting updates",
        "nothing to do",
    )
    CATALOGUE_GREW = (INFO, "the catalogue has {items} items now", "so has the model")
    # rounds and versions
    ROUND_OPENED = (
        INFO,
        "round {round} opened: version {version}, {expected} devices selected, {seconds:span}"
        "[, begins with {carried} updates]",
        "its deadline is `seconds` away",
    )
    ROUND_RESTS = (
        INFO,
        "round {round} rests: version {version} is published for good",
        "all rounds are done, or stopped early",
    )
    ROUND_WAITS = (
        INFO,
        "round {round}: {arrived} of {expected} arrived, waits for {waits_for}, "
        "{seconds_left:span} left",
        "every half minute of a long round",
    )
    ROUND_CLOSED = (
        INFO,
        "round {round} closed: {participants} updates made version {version}[, {metrics}]"
        "[; it waited in vain for {in_vain}][ and {more_in_vain} more]",
        "there is a new version",
    )
    ROUND_WITHOUT_QUORUM = (
        INFO,
        "round {round} closed without quorum: {participants} updates wait for the next one"
        "[; it waited in vain for {in_vain}][ and {more_in_vain} more]",
        "fewer came than `round.quorum`",
    )
    ROUND_HELD = (ERROR, "round {round} is held: {why}", "the problem `round-held`")
    RELEASE_AWAITED = (
        INFO,
        "round {round} is held: {why}; see tessera-aggregator release",
        "what would let it go on",
    )
    ROUND_GOES_ON = (
        INFO,
        "round {round} goes on with {participants} updates",
        "`serve` was started in a round",
    )
    ROUND_STOPPED = (
        ERROR,
        "no round opens after round {round}: {why}",
        "a rollout was stopped for its devices' failures",
    )
    ROUND_TOO_LARGE = (ERROR, "no round opens: {why}", "the problem `no-room`")
    ROUND_LEFT_ALONE = (
        WARNING,
        "round {round} is left alone for now: {problem}",
        "by a worker, which cannot restore its method",
    )
    DEVICES_LACKING = (
        INFO,
        "no round opens before {wanted} devices are enrolled (round.wait_for_devices)"
        "[ with {labels}]; there are {enrolled}",
        "the problem `too-few-devices`",
    )
    UPDATE_QUARANTINED = (
        ERROR,
        "update {update} of {device} passed its check but cannot be absorbed ({why}): it is in "
        "quarantine, and round {round} is held until tessera-aggregator release",
        "the method's code failed; a traceback comes with it",
    )
    SAMPLES_LOWERED = (
        WARNING,
        "round {round}: of these devices fewer samples count than they claim, for the fleet's are "
        "far fewer or what they sent is far from it: {devices}[ and {more} more]",
        "once of each device, with what counts",
    )
    FIRST_VERSION = (INFO, "the first version is {model}", "a warm start")
    EVALUATED = (
        INFO,
        "version {version}: {found}{figures:unsaid}",
        "how good a version is, as devices found out; of each of its `figures` the `stage`, "
        "`metric`, `part` (null: the fleet), `value` and `devices`",
    )
    EVALUATION_LEFT_OUT = (
        WARNING,
        "an evaluation is left out: {problem}",
        "what a device said does not add up",
    )
    EARLY_STOPPED = (
        INFO,
        "no round opens: {metric} of version {version}, {value:.4g}, was not improved for {rounds} "
        "rounds (evaluation.early_stopping)[; devices get version {best}'s model]",
        "the task is done",
    )
    ROLLED_BACK = (INFO, "version {version} is version {source}'s model again", "`rollback`")
    ROLLBACK_DROPPED = (
        ERROR,
        "version {version} cannot be made the next one: {problem}",
        "the problem `rollback-dropped`",
    )
    # keys
    DESCRIPTOR_RENEWED = (
        INFO,
        "the descriptor was renewed; the next holds for {days:.1f} days",
        "nothing to do",
    )
    DESCRIPTOR_KEPT = (ERROR, "{problem}", "it could not be renewed; there is time to mend it")
    KEYS_END = (WARNING, "{problem}", "the problem `keys`, once a day")
    # a cluster
    COORDINATES = (INFO, "coordinating, term {term}", "this process opens and closes rounds")
    STANDS_BY = (
        INFO,
        "standing by: {holder} coordinates (term {term})",
        "this process takes over when that one is gone",
    )
    STANDS_BY_ALONE = (
        WARNING,
        "standing by, while the store is away: {problem}",
        "look at the database server",
    )
    LEASE_NOT_RENEWED = (
        WARNING,
        "the lease was not renewed: {problem}",
        "another process takes over where that lasts",
    )
    LEASE_KEPT = (
        WARNING,
        "the lease could not be given back: {problem}",
        "the next one waits until it has run out",
    )
    END_AWAITED = (INFO, "asked to end: as soon as Ray has started", "nothing to do")
    WORKER_SERVES = (INFO, "worker {worker} serves its shards, epoch {epoch}", "it has its orders")
    WORKER_LOST = (WARNING, "worker {worker} {problem}", "it is started again where there is room")
    WORKER_ENDED = (ERROR, "{problem}", "said by the worker itself")

    def __init__(self, level: int, text: str, means: str) -> None:
        self.level, self.text, self.means = level, text, means

    @property
    def code(self) -> str:
        """Such as ``round-opened``."""
        return self.name.lower().replace("_", "-")

    @property
    def fields(self) -> tuple[str, ...]:
        """In the order in which the text has them."""
        return _fields_of(self.text)

    def log(self, error: BaseException | None = None, /, **fields: object) -> None:
        """It happens, with these fields; ``error``: whose traceback is to stand below it."""
        if not _LOG.isEnabledFor(self.level):
            return
        plain = {name: _plain(value) for name, value in fields.items()}
        extra = {"event": self.code, "fields": plain}
        _LOG.log(self.level, "%s", self._said(plain), exc_info=error, extra=extra, stacklevel=2)

    def _said(self, fields: Mapping[str, object]) -> str:
        def kept(part: re.Match[str]) -> str:
            return part[1] if all(fields[each] for each in _fields_of(part[1])) else ""

        return _Words().vformat(_BRACKETS.sub(kept, self.text), (), fields)


_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def _fields_of(text: str) -> tuple[str, ...]:
    return tuple(name for _, name, _, _ in string.Formatter().parse(text) if name is not None)


class _Words(string.Formatter):
    def format_field(self, value: object, format_spec: str) -> str:
        match value:
            case _ if format_spec == "unsaid":
                return ""
            case int() | float() if format_spec == "span":
                return span(value)
            case dict():
                said = (f"{name} {self.format_field(each, '.4g')}" for name, each in value.items())
                return ", ".join(said)
            case list():
                return ", ".join(map(str, value))
            case str() if format_spec.endswith(("f", "g")):
                return value  # a number that JSON does not know
        return format(value, format_spec)


def _plain(value: object) -> object:
    """As JSON has it, and printable: texts may be of devices and brokers."""
    match value:
        case bytes():
            return value.hex()
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {printable(str(name)): _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    return printable(str(value))


# Which task a log line is about.

_TASK = ContextVar("task", default="")


@contextmanager
def about(task: str) -> Iterator[None]:
    """What is logged meanwhile, by whatever part, is about this task; empty: about none."""
    token = _TASK.set(task)
    try:
        yield
    finally:
        _TASK.reset(token)


def task_of_line() -> str:
    """The task that is logged about at present; empty for none."""
    return _TASK.get()
