"""Trusting another root key, on the operator's word: for a device that cannot follow by itself.

A device follows from root to root by the successions that each root signed. It cannot where the old
root key was lost, or where whoever stole it signed a succession of his own, or after too many
rotations. Then a fresh enrolment code says which root to trust; identity, data and updates stay.
"""

from __future__ import annotations

from device_sdk.home.errors import EnrolmentRefused, NotEnrolled
from device_sdk.home.home import Home
from device_sdk.home.membership import seen
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal.enrolment_code import parse_code

__all__ = ["trust"]


def trust(home: Home, code_text: str, *, set_clock_back: bool = False) -> None:
    """Make the code's root, serial and time what this device believes; on the disk on return.

    The code is not used up: only what it says of the aggregator is taken. ``set_clock_back`` allows
    a code that was made before the time that the device believes in, which whoever held the old
    keys may have set. Raises :class:`NotEnrolled`, and :class:`EnrolmentRefused`: ``bad-code``,
    ``old-code``, ``serial-fell`` or ``time-fell`` (an older code than the device has seen keys, or
    times, of).
    """
    membership = home.membership.load()
    if membership is None:
        raise NotEnrolled(f"the device of {home.folder} has not joined a fleet: enrol it")
    try:
        code = parse_code(code_text)
    except WireError as error:
        raise EnrolmentRefused(
            error.reason, f"the enrolment code cannot be used: {error.args[0]}"
        ) from error
    same_root = code.root_fingerprint == membership.root_fingerprint
    known = seen(home.membership.descriptor(membership.root_fingerprint)) if same_root else None
    if known is not None and code.least_serial < known.serial:
        raise EnrolmentRefused(
            "serial-fell", "the code is older than the keys this device has seen: ask for a new one"
        )
    if code.made_unix_seconds < home.membership.largest_time() and not set_clock_back:
        raise EnrolmentRefused(
            "time-fell",
            "the code was made before the time that this device believes in: ask for a new one, or "
            "set that time back (--set-clock-back) if the code is of today",
        )
    home.membership.trust(code.root_fingerprint, code.least_serial, code.made_unix_seconds)
