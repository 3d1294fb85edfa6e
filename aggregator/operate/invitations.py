"""Enrolment codes: made, listed while nobody has used them, and withdrawn."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aggregator.clock import moment_of
from aggregator.errors import AggregatorError
from aggregator.keys.enrolment import make_codes
from aggregator.keys.folder import current_descriptor
from aggregator.keys.registry import revoke
from aggregator.operate.devices import changed_labels, require_device_name
from aggregator.operate.lookup import SECONDS_LIMIT, device_of, require_number
from aggregator.operate.names import ID_DIGITS, called
from aggregator.store import Store
from aggregator.store.rows import TokenRow
from device_sdk.system.files import flush_file, flush_folder
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.enrolment_message import parse_code, without_codes
from device_sdk.wire.seal.keys import RandomBytes

DAY_SECONDS = 86_400
_CODES_LIMIT = 1_000_001


@dataclass(frozen=True, slots=True)
class UnusedCode:
    """A code that lets a device join, without what makes it one.

    Attributes:
        code_id: its first digits, by which it is withdrawn: whoever knows them cannot join.
        name, labels: of whoever joins with it.
        replaces: the id of the device whose place is taken, which is revoked; None for none.
    """

    code_id: str
    name: str | None
    labels: Mapping[str, str]
    expires_unix_seconds: int
    replaces: str | None

    @classmethod
    def of(cls, row: TokenRow) -> UnusedCode:
        """Of its row."""
        replaces = None if row.replaces is None else row.replaces.hex()
        code_id = row.token_id.hex()[:ID_DIGITS]
        return cls(code_id, row.name, dict(row.labels), row.expires_unix_seconds, replaces)


def invite(
    store: Store,
    now: int,
    random_bytes: RandomBytes,
    *,
    count: int,
    expires_seconds: int,
    name: str | None,
    labels: Mapping[str, str],
    replaces: str | None,
    out: Path | None,
) -> list[str]:
    """Codes, which are in the store then, and before that in the new file ``out``, if any. Raises
    AggregatorError."""
    if replaces is not None and count != 1:
        raise AggregatorError("--replaces goes with one code: leave out --count")
    if name is not None and count != 1:
        raise AggregatorError("--name goes with one code: leave out --count, or use --label")
    require_number("the number of codes", count, 1, _CODES_LIMIT)
    require_number("how long a code holds, in seconds,", expires_seconds, 1, SECONDS_LIMIT)
    if name is not None:
        require_device_name(name)
    labels = changed_labels(labels, {})
    _require_keys_of(now, store)
    replaced = None if replaces is None else device_of(store, replaces).device_id
    codes = make_codes(store, count, now, random_bytes)
    texts = [code.to_text() for code in codes]
    # The codes are on the disk before anything is revoked or can be used, or neither happens.
    if out is not None:
        _write_new(out, "".join(f"{text}\n" for text in texts))
    try:
        with store.database.transaction():
            if replaced is not None:
                revoke(store, replaced, now)
            for code in codes:
                store.tokens.add(code, now, now + expires_seconds, replaced, name, labels)
    except BaseException:
        if out is not None:
            out.unlink()
        raise
    return texts


def unused_codes(store: Store, now: int) -> list[UnusedCode]:
    """Those that can still be used, the ones that end first before the others."""
    return [UnusedCode.of(row) for row in store.tokens.usable(now)]


def code_id_of(text: str) -> str:
    """The id of a whole code, which tells nothing of its secret; else ``text``, but for what may be
    the most of a code."""
    try:
        return parse_code(text).token_id.hex()
    except WireError:
        return without_codes(text)


def withdraw(store: Store, code_id: str, now: int) -> UnusedCode:
    """Delete an unused code, as ``Fleet`` says: nobody joins with it any more. Raises
    AggregatorError unless it is just one. A device that it was to replace stays revoked."""
    wanted = code_id.strip().lower()
    with store.database.transaction():
        unused = store.tokens.usable(now)
        found = [row for row in unused if wanted and row.token_id.hex().startswith(wanted)]
        if len(found) == 1:
            store.tokens.withdraw(found[0].token_id)
            return UnusedCode.of(found[0])
        if found:
            raise AggregatorError(
                f"{len(found)} codes have an id that begins with {code_id!r}: give more of it"
            )
        for device in store.devices.all() if wanted else ():
            if device.token_id.hex().startswith(wanted):
                raise AggregatorError(
                    f"the code {code_id} was used by {called(device)}: revoke sends a device away"
                )
    raise AggregatorError(
        f"no code that can still be used has an id that begins with {code_id!r}; see "
        "tessera-aggregator invite --list"
    )


def _require_keys_of(now_unix_seconds: int, store: Store) -> None:
    """Whoever is told by a code that it is so late believes no keys that have ended before."""
    ends = current_descriptor(store).expires_unix_seconds
    if now_unix_seconds >= ends:
        raise AggregatorError(
            f"this machine's clock says {moment_of(now_unix_seconds)}, and the keys in force ended "
            f"at {moment_of(ends)}: set the clock right or, if it is right, start serve first, "
            "which renews them"
        )


def _write_new(path: Path, text: str) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise AggregatorError(
            f"--out: {path} exists, and the codes in it may still be needed: name a new file"
        ) from None
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        flush_file(file.fileno())
    flush_folder(path.parent)
