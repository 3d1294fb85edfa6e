from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import hpke, signature
from device_sdk.wire.seal.keys import (
    KeyKind,
    draw,
    erase_key,
    fingerprint,
    generate,
    read_key,
    write_key,
)
from device_sdk.wire.seal.signature import Purpose
from tests.fakes.parties import SeededBytes, key_from
from tests.fakes.refusals import reason_of


@pytest.mark.parametrize("kind", list(KeyKind))
def test_a_key_file_is_private_flushed_and_never_overwritten(
    tmp_path: Path, kind: KeyKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    real_fsync = os.fsync

    def fsync(handle: int) -> None:
        flushed.append(stat.S_IFMT(os.fstat(handle).st_mode))
        real_fsync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "secret.key"
    secret = generate(kind, SeededBytes("x"))
    old_mask = os.umask(0)
    try:
        write_key(path, kind, secret)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert flushed == [stat.S_IFREG, stat.S_IFDIR]
    assert read_key(path, kind) == secret
    with pytest.raises(FileExistsError):
        write_key(path, kind, generate(kind))
    assert read_key(path, kind) == secret
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret.key"]


def test_a_key_file_that_others_can_read_or_that_is_broken_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret.key"
    write_key(path, KeyKind.ED25519, bytes(32))
    good = path.read_text()
    path.chmod(0o640)
    with pytest.raises(WireError, match=f"{path} can be read by others; run chmod 600 on it"):
        read_key(path, KeyKind.ED25519)
    path.chmod(0o600)
    broken = [
        "",
        "\xff\xfe",
        good.replace("1 ed", "2 ed"),
        good.replace("ed25519", "symmetric-256"),
        good.replace("AAAA", "AA!A", 1),
        good.replace("AAAA", "AA!AA", 1),
        good.replace("AAAA", "", 1),
        good + "x",
        "x" * 10_000,
    ]
    for text in broken:
        path.write_text(text, encoding="latin-1")
        with pytest.raises(WireError, match=f"^bad-key-file: .*{path}"):
            read_key(path, KeyKind.ED25519)
    with pytest.raises(WireError, match="bad-key-file: /dev/null is not a regular file"):
        read_key(Path("/dev/null"), KeyKind.ED25519)
    link = tmp_path / "link.key"
    link.symlink_to(path)
    with pytest.raises(OSError, match=r"."):
        read_key(link, KeyKind.ED25519)
    with pytest.raises(ValueError, match="32 bytes"):
        write_key(tmp_path / "short.key", KeyKind.ED25519, b"short")
    with pytest.raises(ValueError, match="random source"):
        draw(lambda count: b"", 4)


def test_hpke_round_trip_binds_key_info_and_every_byte() -> None:
    seed = SeededBytes("seed")(hpke.SEED_BYTES)
    key = hpke.private_key(seed)
    public = hpke.public_key(hpke.public_bytes(seed))
    sealed = hpke.seal(public, b"info", b"text")
    assert len(sealed) == 4 + hpke.OVERHEAD_BYTES
    assert hpke.unseal(key, b"info", sealed) == b"text"
    other = hpke.private_key(SeededBytes("other")(hpke.SEED_BYTES))
    attempts = [(other, b"info", sealed), (key, b"inf", sealed), (key, b"info", sealed[:-1])]
    for place in (0, 500, 1087, 1088, 1119, 1120, len(sealed) - 1):
        changed = bytearray(sealed)
        changed[place] ^= 1
        attempts.append((key, b"info", bytes(changed)))
    attempts += [(key, b"info", b""), (key, b"info", bytes(1120)), (key, b"info", b"x" * 5000)]
    for attempt in attempts:
        assert reason_of(hpke.unseal, *attempt) == "cannot-unseal"


def test_hpke_public_keys_are_checked() -> None:
    good = hpke.public_bytes(SeededBytes("seed")(hpke.SEED_BYTES))
    for raw in (b"", good[:-1], good + b"x", b"\xff" * len(good)):
        assert reason_of(hpke.public_key, raw) == "bad-key"
    no_secret = hpke.public_key(good[:-32] + bytes(32))  # X25519 with a point of small order
    assert reason_of(hpke.seal, no_secret, b"", b"") == "bad-key"
    for make in (hpke.private_key, hpke.public_bytes):
        with pytest.raises(ValueError, match="96"):
            make(b"short")


def test_signatures_are_bound_to_their_purpose() -> None:
    key = key_from("k")
    public = key.public_key()
    signed = signature.sign(key, Purpose.PRESENCE, b"m")
    signature.verify(public, Purpose.PRESENCE, b"m", signed)
    changed = bytes([signed[0] ^ 1]) + signed[1:]
    for purpose, message, attempt in [
        (Purpose.DESCRIPTOR, b"m", signed),
        (Purpose.PRESENCE, b"n", signed),
        (Purpose.PRESENCE, b"m", changed),
        (Purpose.PRESENCE, b"m", b""),
    ]:
        assert reason_of(signature.verify, public, purpose, message, attempt) == "bad-signature"


def test_no_label_is_the_beginning_of_another() -> None:
    labels = [purpose.value + b"\x00" for purpose in Purpose]
    assert not any(a != b and a.startswith(b) for a in labels for b in labels)


SMALL_ORDER = [
    "00" * 32,
    "01" + "00" * 31,
    "00" * 31 + "80",
    "01" + "00" * 30 + "80",
    "ec" + "ff" * 30 + "7f",
    "ec" + "ff" * 31,
    "ed" + "ff" * 30 + "7f",
    "ed" + "ff" * 31,
    "ee" + "ff" * 30 + "7f",
    "ee" + "ff" * 31,
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
]


@pytest.mark.parametrize("raw", [*map(bytes.fromhex, SMALL_ORDER), b"", bytes(31), bytes(33)])
def test_keys_that_identify_nobody_are_refused(raw: bytes) -> None:
    assert reason_of(signature.public_key, raw) == "bad-key"


def test_a_fingerprint_is_not_the_bare_hash() -> None:
    assert len(fingerprint(bytes(32))) == 16
    assert fingerprint(bytes(32)) != fingerprint(bytes(31) + b"\x01")


def test_an_erased_key_is_gone_and_its_bytes_are_zero(tmp_path: Path) -> None:
    path = tmp_path / "some.key"
    write_key(path, KeyKind.SYMMETRIC, b"s" * 32)
    with path.open("rb") as held:
        length = len(held.read())
        erase_key(path)
        held.seek(0)
        assert held.read() == bytes(length)
    assert list(tmp_path.iterdir()) == []
    erase_key(path)  # none there is right too


def test_erasing_what_a_crash_left_spares_the_key_that_shares_its_bytes(tmp_path: Path) -> None:
    path, left = tmp_path / "some.key", tmp_path / ".some.key.7.tmp"
    write_key(path, KeyKind.SYMMETRIC, b"s" * 32)
    os.link(path, left)  # killed between giving the name and taking the temporary one away
    erase_key(left)
    assert read_key(path, KeyKind.SYMMETRIC) == b"s" * 32
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are followed here")
def test_a_link_in_a_key_s_place_erases_nothing(tmp_path: Path) -> None:
    key, link = tmp_path / "somebody-else.key", tmp_path / "a.key"
    write_key(key, KeyKind.SYMMETRIC, bytes(range(32)))
    link.symlink_to(key)
    with pytest.raises(OSError):
        erase_key(link)
    assert read_key(key, KeyKind.SYMMETRIC) == bytes(range(32))


def test_what_a_crash_leaves_of_an_erased_key_has_a_temporary_name_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(descriptor: int) -> None:
        raise OSError("the power is gone")

    path = tmp_path / "a.key"
    write_key(path, KeyKind.SYMMETRIC, bytes(32))
    monkeypatch.setattr("device_sdk.wire.seal.keys.flush_file", crash)
    left = {f".a.key.{os.getpid()}.tmp"}
    for name in (path, *(tmp_path / each for each in left)):
        with pytest.raises(OSError, match="power"):
            erase_key(name)
        assert {each.name for each in tmp_path.iterdir()} == left
