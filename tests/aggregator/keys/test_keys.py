"""The folder of keys: renewed, rotated, erased, taken over from before, and killed in between."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys import folder as key_folder
from aggregator.keys.enrolment import make_codes
from aggregator.keys.folder import (
    FleetKeys,
    Lives,
    current_descriptor,
    initialise,
    read_serving_keys,
    renew_descriptor,
    rotate_keys,
    rotate_root,
    tidy_keys,
)
from aggregator.store import Store
from aggregator.store.devices import Secrets
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import hpke
from device_sdk.wire.seal.descriptor import (
    MOST_SUCCESSIONS,
    DescriptorSeen,
    make_descriptor,
    read_descriptor,
)
from device_sdk.wire.seal.enrolment import require_current
from device_sdk.wire.seal.keyring import Keyring, ServingKeys
from device_sdk.wire.seal.keys import KeyKind, fingerprint, read_key, signing_key
from tests.fakes.homes import command, make_home, serving
from tests.fakes.outputs import error_of, output_of
from tests.fakes.waiting import PATIENCE_SECONDS

DAY = 86_400
BEGIN = 1_800_000_000


@dataclass
class Calendar:
    """A clock that is set."""

    now: float = float(BEGIN)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def home() -> Iterator[AggregatorHome]:
    """In memory where there is one: hundreds of commits, and no power to fail."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        made = AggregatorHome(Path(folder) / "home")
        initialise(made, BEGIN, os.urandom)
        yield made


@pytest.fixture
def store(home: AggregatorHome) -> Iterator[Store]:
    opened = home.open_store()
    yield opened
    opened.database.close()


def names(home: AggregatorHome) -> set[str]:
    return {path.name for path in home.keys.iterdir()}


def keys_of(home: AggregatorHome, store: Store, clock: Calendar) -> FleetKeys:
    return FleetKeys(home, store, clock, clock, os.urandom, 30 * DAY)


def test_a_descriptor_is_renewed_by_the_delegate_until_the_delegation_ends(
    home: AggregatorHome, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    home.root_key.unlink()  # in a drawer
    clock = Calendar()
    root, first = store.facts.root_fingerprint, current_descriptor(store)
    keys = keys_of(home, store, clock)
    told: list[Keyring[ServingKeys]] = []
    keys.watch(told.append)
    seen, serials = first, [first.serial]
    while clock.now < BEGIN + 364 * DAY:
        clock.now += DAY / 2
        # A device that comes by at any time finds what it can trust.
        keys.current().descriptor.require_unexpired(int(clock.now))
        if keys.tend(between_rounds=True):
            new = keys.current().descriptor
            assert read_descriptor(new.message, root) == new
            assert new.serial > seen.serial and new.signing != seen.signing
            assert new.hpke != seen.hpke
            seen = new
            serials.append(new.serial)
    assert 17 <= len(serials) <= 20 and seen.expires_unix_seconds == BEGIN + 365 * DAY
    # All but the last and what is in its grace was told, erased and forgotten.
    assert len(store.secrets.descriptors()) == len(read_serving_keys(home, store, clock)) <= 2
    assert len(names(home)) <= 1 + 2 * 2
    assert "rotate keys" in caplog.text
    clock.now = BEGIN + 365 * DAY
    with pytest.raises(AggregatorError, match="rotate keys"):
        keys_of(home, store, clock)


def test_a_round_is_not_disturbed_while_there_is_time(home: AggregatorHome, store: Store) -> None:
    clock = Calendar()
    keys = keys_of(home, store, clock)
    clock.now = BEGIN + 21 * DAY
    assert not keys.tend(between_rounds=False)
    clock.now = BEGIN + 26 * DAY
    assert keys.tend(between_rounds=False), "a round may last"
    assert not keys.tend(between_rounds=True)


def test_a_start_renews_a_descriptor_that_expired_meanwhile(
    home: AggregatorHome, store: Store
) -> None:
    clock = Calendar(float(BEGIN + 100 * DAY))
    held = keys_of(home, store, clock).current().descriptor
    assert held.expires_unix_seconds == BEGIN + 130 * DAY


def test_a_delegate_s_key_that_is_gone_is_told_of_and_ends_nothing(
    home: AggregatorHome, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Calendar()
    keys = keys_of(home, store, clock)
    for path in home.keys.glob("delegate-*"):
        path.unlink()
    clock.now = BEGIN + 21 * DAY
    for _ in range(5):
        assert not keys.tend(between_rounds=True)
    assert [record.levelno for record in caplog.records] == [logging.ERROR], "once a day"
    assert "delegate" in caplog.text and "rotate keys" in caplog.text


def test_keys_are_erased_when_their_grace_is_over(home: AggregatorHome, store: Store) -> None:
    clock = Calendar()
    keys = keys_of(home, store, clock)
    ring = [keys.keyring]
    keys.watch(lambda new: ring.append(new))
    old = keys.current().descriptor
    files = {
        home.signing_key(old.serial),
        home.sessions_key(old.serial),
        home.hpke_key(old.serial),
    }
    seeds = {path.read_bytes() for path in files}
    assert names(home) >= {path.name for path in files}
    rotate_keys(home, store, BEGIN + DAY, os.urandom)
    assert keys.refresh()
    clock.now = BEGIN + 8 * DAY - 1
    keys.tend(between_rounds=True)
    assert all(path.exists() for path in files)
    assert ring[-1].find(old.serial, int(clock.now)).descriptor == old
    clock.now = BEGIN + 8 * DAY
    assert not keys.tend(between_rounds=True), "the descriptor in force is the same"
    assert not any(path.exists() for path in files)
    left = b"".join(path.read_bytes() for path in home.keys.iterdir())
    assert not any(seed in left for seed in seeds)
    assert [each.serial for each in store.secrets.descriptors()] == [
        keys.current().descriptor.serial
    ]
    with pytest.raises(WireError) as refused:
        ring[-1].find(old.serial, int(clock.now))
    assert refused.value.reason == "retired-descriptor"


def test_keys_whose_grace_was_over_before_serve_looked_are_erased_too(
    home: AggregatorHome, store: Store
) -> None:
    clock = Calendar()
    keys = keys_of(home, store, clock)
    old = keys.current().descriptor.serial
    clock.now += 10
    # Not by rotate_keys, which tidies by itself: the grace began and ended between two looks.
    renew_descriptor(home, store, BEGIN + 5, os.urandom, 30 * DAY)
    with store.database.transaction():
        store.database.execute(
            "UPDATE descriptors SET honoured_until_unix = ? WHERE serial = ?", (BEGIN + 6, old)
        )
    assert keys.refresh()
    keys.tend(between_rounds=False)
    for each in (home.signing_key, home.sessions_key, home.hpke_key):
        assert not each(old).exists()


def test_what_is_erased_is_overwritten_first(home: AggregatorHome, store: Store) -> None:
    serial = current_descriptor(store).serial
    held = home.signing_key(serial).open("rb")  # the bytes that a freed file would leave behind
    secret = held.read()
    rotate_keys(home, store, BEGIN, os.urandom, Lives(grace_seconds=0))
    held.seek(0)
    assert held.read() == bytes(len(secret))
    held.close()


def test_old_keys_are_honoured_no_longer_than_their_descriptor_holds(
    home: AggregatorHome, store: Store
) -> None:
    old = current_descriptor(store)
    rotate_keys(home, store, BEGIN + 29 * DAY, os.urandom)
    [until, none] = [each.honoured_until_unix_seconds for each in store.secrets.descriptors()]
    assert (until, none) == (old.expires_unix_seconds, None)
    rotate_keys(home, store, BEGIN + 29 * DAY, os.urandom, Lives(grace_seconds=60))
    times = [each.honoured_until_unix_seconds for each in store.secrets.descriptors()]
    assert times == [BEGIN + 29 * DAY + 60] * 2 + [None], "a shorter grace is for all of them"


@pytest.mark.parametrize(
    "lives", [(0,), (DAY, DAY - 1), (DAY, 6 * 365 * DAY), (DAY, DAY, 31 * DAY), (DAY, DAY, -1)]
)
def test_lives_that_make_no_sense_are_refused(lives: tuple[int, ...]) -> None:
    with pytest.raises(AggregatorError):
        Lives(*lives)


def test_a_new_delegation_outranks_all_that_the_last_one_can_sign(
    home: AggregatorHome, store: Store
) -> None:
    root, old = store.facts.root_fingerprint, current_descriptor(store)
    thief = signing_key(read_key(home.delegate_key(old.delegation.first_serial), KeyKind.ED25519))
    rotate_keys(home, store, BEGIN + 60, os.urandom)
    assert not home.delegate_key(old.delegation.first_serial).exists()
    [code] = make_codes(store, 1, BEGIN + 60, os.urandom)
    forged = make_descriptor(
        thief,
        old.delegation,
        old.delegation.last_serial,
        old.issued_unix_seconds,
        old.delegation.expires_unix_seconds,
        old.signing,
        old.sessions,
        old.hpke,
    )
    with pytest.raises(WireError) as refused:
        require_current(code, forged)
    assert refused.value.reason == "serial-fell"
    new = current_descriptor(store)
    with pytest.raises(WireError) as refused:
        read_descriptor(forged.message, root, DescriptorSeen(new.root, new.serial, new.digest))
    assert refused.value.reason == "serial-fell"


def test_a_restored_backup_gives_out_no_serial_again(home: AggregatorHome, store: Store) -> None:
    """The same home twice: what one of them issued, the other knows nothing of."""
    known = current_descriptor(store)
    lost = [
        renew_descriptor(home, store, BEGIN + 20 * DAY, os.urandom, 30 * DAY),
        renew_descriptor(home, store, BEGIN + 40 * DAY, os.urandom, 30 * DAY),
    ]
    with store.database.transaction():
        for each in lost:
            store.secrets.forget(each.serial)
        store.database.execute("UPDATE descriptors SET honoured_until_unix = NULL")
    assert current_descriptor(store) == known
    again = renew_descriptor(home, store, BEGIN + 41 * DAY, os.urandom, 30 * DAY)
    assert again.serial > max(each.serial for each in lost)
    first = rotate_keys(home, store, BEGIN + 42 * DAY, os.urandom)
    with store.database.transaction():
        store.secrets.forget(first.serial)
        store.database.execute("UPDATE descriptors SET honoured_until_unix = NULL")
    second = rotate_keys(home, store, BEGIN + 43 * DAY, os.urandom)
    assert second.serial > first.serial


@pytest.mark.parametrize("rotations", [0, 1, 3, MOST_SUCCESSIONS, MOST_SUCCESSIONS + 1])
def test_whoever_trusted_the_root_some_rotations_ago_follows(
    home: AggregatorHome, store: Store, rotations: int
) -> None:
    trusted = store.facts.root_fingerprint
    [code] = make_codes(store, 1, BEGIN, os.urandom)
    old_keys = [home.root_key.read_bytes()]
    for number in range(rotations):
        made = rotate_root(home, store, BEGIN + number * DAY, os.urandom)
        assert made.root_fingerprint == store.facts.root_fingerprint != trusted
        assert home.root_key.read_bytes() not in old_keys and not home.next_root_key.exists()
        old_keys.append(home.root_key.read_bytes())
    held = read_serving_keys(home, store, lambda: BEGIN + rotations * DAY)
    message = held[-1].descriptor.message
    assert len(held) == min(rotations, 6) + 1, "old keys are honoured over rotations of the root"
    if rotations > MOST_SUCCESSIONS:
        with pytest.raises(WireError) as refused:
            read_descriptor(message, trusted)
        assert refused.value.reason == "wrong-root"
        return
    followed = read_descriptor(message, trusted)
    assert followed.root_fingerprint == store.facts.root_fingerprint
    # A code of before still leads there.
    require_current(code, followed)
    assert rotate_keys(home, store, BEGIN + 9 * DAY, os.urandom).successions == (
        followed.successions
    )


def test_another_aggregator_s_root_key_changes_nothing(
    home: AggregatorHome, store: Store, tmp_path: Path
) -> None:
    other = AggregatorHome(tmp_path / "other")
    initialise(other, BEGIN, os.urandom)
    home.root_key.unlink()
    home.root_key.write_bytes(other.root_key.read_bytes())
    home.root_key.chmod(0o600)
    before, held = names(home), current_descriptor(store)
    for rotate in (rotate_keys, rotate_root):
        with pytest.raises(AggregatorError, match="another aggregator"):
            rotate(home, store, BEGIN, os.urandom)
    assert names(home) == before and current_descriptor(store) == held


STEPS = ("write_key", "erase_key", "flush_folder")


def _dies_at(step: int, work: Callable[[], object]) -> bool:
    """Whether a process that kills itself before the ``step``-th change did so in ``work``."""
    child = os.fork()
    if child == 0:
        try:
            left = step

            def act() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            def counted(call: Callable[..., Any]) -> Callable[..., Any]:
                def wrapped(*values: Any, **named: Any) -> Any:
                    act()
                    return call(*values, **named)

                return wrapped

            for name in STEPS:
                setattr(key_folder, name, counted(getattr(key_folder, name)))
            # A key file is there in part, or under its passing name only; the rename; the commit.
            os.link = counted(os.link)
            os.unlink = counted(os.unlink)
            os.replace = counted(os.replace)
            Secrets.issue = counted(Secrets.issue)  # type: ignore[method-assign]
            Secrets.forget = counted(Secrets.forget)  # type: ignore[method-assign]
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _start(home: AggregatorHome, now: int) -> None:
    clock = Calendar(float(now + 8 * DAY))
    FleetKeys(home, home.open_store(), clock, clock, os.urandom, 30 * DAY)


@pytest.mark.parametrize("what", ["keys", "root", "renewal"])
def test_kill_nine_between_any_two_steps(home: AggregatorHome, what: str) -> None:
    """After each death the same home: serving goes on, devices can follow, nothing is left over."""
    # From a process of its own: it forks hundreds of times, and pytest's holds half a gigabyte.
    child = get_context("spawn").Process(
        target=_kill_between_any_two_steps, args=(home, what), daemon=True
    )
    child.start()
    child.join()
    assert child.exitcode == 0  # else its traceback is in what was printed


def _kill_between_any_two_steps(home: AggregatorHome, what: str) -> None:
    opened = home.open_store()
    trusted = opened.facts.root_fingerprint
    opened.database.close()
    deaths, now = 0, BEGIN
    while True:
        now += 3600

        def work(now: int = now) -> None:
            store = home.open_store()
            if what == "renewal":
                renew_descriptor(home, store, now, os.urandom, 30 * DAY)
                tidy_keys(home, store, now + 8 * DAY)
            elif what == "keys":
                rotate_keys(home, store, now, os.urandom, Lives(grace_seconds=0))
            else:
                rotate_root(home, store, now, os.urandom, Lives(grace_seconds=0))

        died = _dies_at(deaths + 1, work)
        # The next start dies, too, before each of its own steps.
        again = 1
        while died and _dies_at(again, lambda now=now: _start(home, now)):  # type: ignore[misc]
            again += 1
        store = home.open_store()
        clock = Calendar(float(now + 8 * DAY))
        keys = FleetKeys(home, store, clock, clock, os.urandom, 30 * DAY)
        held = keys.current().descriptor
        if store.facts.root_fingerprint != trusted:
            assert held.follows_from(trusted)
            trusted = store.facts.root_fingerprint
        assert read_descriptor(held.message, trusted) == held
        root = signing_key(read_key(home.root_key, KeyKind.ED25519))
        assert fingerprint(root.public_key().public_bytes_raw()) == trusted
        first = held.delegation.first_serial
        expected = {"root.key", f"delegate-{first}.key"}
        for each in store.secrets.descriptors():
            expected |= {f"{kind}-{each.serial}.key" for kind in ("signing", "sessions", "hpke")}
        assert names(home) == expected
        assert hpke.public_bytes(read_key(home.hpke_key(held.serial), KeyKind.HPKE)) == held.hpke
        store.database.close()
        if not died:
            break
        deaths += 1
    assert deaths >= 6, deaths


def test_a_serve_erases_and_renews_while_a_command_rotates(home: AggregatorHome) -> None:
    """Two processes at one folder: every descriptor that is in force has its keys."""
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                store = home.open_store()
                for number in range(10):
                    rotate_keys(home, store, BEGIN + number, os.urandom, Lives(grace_seconds=1))
                    tidy_keys(home, store, BEGIN + number)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    store = home.open_store()
    keys = keys_of(home, store, Calendar(float(BEGIN + 60)))
    assert len(names(home)) == 5
    first = BEGIN // 3600 << 16
    assert keys.current().descriptor.serial == first + 20 * (1 << 16)
    store.database.close()


def test_key_files_of_a_running_serve_go_at_their_time(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()
    old = current_descriptor(store)
    with serving(home):
        assert command(home, "rotate", "keys", "--grace", "1s") == 0
        until = time.monotonic() + PATIENCE_SECONDS
        while home.signing_key(old.serial).exists() or home.hpke_key(old.serial).exists():
            assert time.monotonic() < until
            time.sleep(0.05)
    assert old.serial not in {each.serial for each in store.secrets.descriptors()}
    store.database.close()


def test_a_restored_home_shows_a_descriptor_above_those_made_since_the_backup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()
    before = current_descriptor(store)
    assert "rotate keys now" in output_of(capsys, home, "restored")
    assert current_descriptor(store).serial > before.serial
    store.database.close()


def test_a_restored_home_without_its_delegate_s_key_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    for path in home.keys.glob("delegate-*"):
        path.unlink()
    assert "the delegate's key cannot be used" in error_of(capsys, home, "restored")
