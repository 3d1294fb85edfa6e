"""Project Wycheproof's vectors against the primitives, as the product calls them.

X25519 and ML-KEM-768 are called by nobody but HPKE: their vectors are wrapped into sealed messages
by a sender written here from RFC 9180 and the hybrid KEM's draft, and `hpke.unseal` opens them.
The rest go through the very objects that the product constructs. Each file's vectors are counted by
what became of them, so that none is left out in silence, nor one that a newer file brings.
"""

from __future__ import annotations

import ast
import hashlib
import hmac
import json
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from benchmarks.harness import default_data_folder
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.seal import broadcast, hpke, signature
from device_sdk.wire.seal.signature import Purpose
from tests.fakes.parties import SeededBytes, key_from
from tests.fakes.refusals import reason_of

INFO, TEXT = b"what it is for", b"what is said"
OTHER_X25519 = SeededBytes("the X25519 half")(32)
OTHER_MLKEM = SeededBytes("the ML-KEM half")(64)


@dataclass(frozen=True)
class Vector:
    """One test of a file. ``group`` has what stands for several of them."""

    fields: dict[str, Any]
    group: dict[str, Any]

    def __getitem__(self, name: str) -> bytes:
        return bytes.fromhex(self.fields[name])

    @property
    def result(self) -> str:
        return str(self.fields["result"])

    @property
    def flags(self) -> list[str]:
        return list(self.fields["flags"])


def vectors(name: str) -> Iterator[Vector]:
    """All of a file, in its order; skips the test where the data is missing."""
    path = default_data_folder() / "wycheproof" / f"{name}_test.json"
    if not path.is_file():
        pytest.skip(f"no {path}: set TESSERA_DATA to the folder of data sets")
    found = json.loads(path.read_text(encoding="utf-8"))
    tests = [Vector(test, group) for group in found["testGroups"] for test in group["tests"]]
    assert len(tests) == found["numberOfTests"]
    return iter(tests)


# What the sender of a sealed message does (RFC 9180, base mode; ids of the protocol's suite).

_SUITE_ID = b"HPKE" + struct.pack(">HHH", 0x647A, 0x0001, 0x0003)
_XWING_LABEL = b"\\.//^\\"


def _extract(salt: bytes, label: bytes, secret: bytes) -> bytes:
    return hmac.digest(salt, b"HPKE-v1" + _SUITE_ID + label + secret, "sha256")


def _expand(secret: bytes, label: bytes, info: bytes, length: int) -> bytes:
    labelled = struct.pack(">H", length) + b"HPKE-v1" + _SUITE_ID + label + info
    return hmac.digest(secret, labelled + b"\x01", "sha256")[:length]


def sealed_by_hand(
    mlkem_secret: bytes, mlkem_ciphertext: bytes, x25519_secret: bytes, sent: bytes, own: bytes
) -> bytes:
    """``TEXT`` for the holder of the X25519 public key ``own``; ``sent``: the ephemeral one."""
    mixed = mlkem_secret + x25519_secret + sent + own + _XWING_LABEL
    shared = hashlib.sha3_256(mixed).digest()
    context = b"\x00" + _extract(b"", b"psk_id_hash", b"") + _extract(b"", b"info_hash", INFO)
    secret = _extract(shared, b"secret", b"")
    cipher = ChaCha20Poly1305(_expand(secret, b"key", context, 32))
    nonce = _expand(secret, b"base_nonce", context, 12)
    return mlkem_ciphertext + sent + cipher.encrypt(nonce, TEXT, b"")


def x25519_public(scalar: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(scalar).public_key().public_bytes_raw()


def unseals(seed: bytes, sealed: bytes) -> bool:
    """Whether ``seed``'s key opens ``TEXT``; the only other way out is the wire's refusal."""
    try:
        return hpke.unseal(hpke.private_key(seed), INFO, sealed) == TEXT
    except WireError as error:
        assert error.reason == "cannot-unseal"
        return False


def can_be_sealed_to(public: bytes) -> bool:
    try:
        hpke.seal(hpke.public_key(public), INFO, TEXT)
        return True
    except WireError as error:
        assert error.reason == "bad-key"
        return False


def test_x25519_inside_hpke() -> None:
    """Points on the twist and non-canonical ones are accepted, as RFC 7748 asks; a point of small
    order is refused by both ends, since the secret would be known to everybody."""
    mlkem_public = hpke.public_bytes(OTHER_MLKEM + OTHER_X25519)[:-32]
    mlkem_secret, mlkem_ciphertext = (
        hpke.MLKEM768PrivateKey.from_seed_bytes(OTHER_MLKEM).public_key().encapsulate()
    )
    came: Counter[tuple[str, bool]] = Counter()
    for vector in vectors("x25519"):
        sealed = sealed_by_hand(
            mlkem_secret,
            mlkem_ciphertext,
            vector["shared"],
            vector["public"],
            x25519_public(vector["private"]),
        )
        opened = unseals(OTHER_MLKEM + vector["private"], sealed)
        assert opened == ("ZeroSharedSecret" not in vector.flags), vector
        assert can_be_sealed_to(mlkem_public + vector["public"]) == opened, vector
        came[vector.result, opened] += 1
    assert came == {("valid", True): 264, ("acceptable", True): 223, ("acceptable", False): 31}


def test_ml_kem_768_inside_hpke() -> None:
    """Among them ciphertexts that nobody encapsulated: these give a secret of their own (implicit
    rejection), with which the vector's sender and the product must agree."""
    ephemeral = SeededBytes("ephemeral")(32)
    sent, own = x25519_public(ephemeral), x25519_public(OTHER_X25519)
    agreed = X25519PrivateKey.from_private_bytes(OTHER_X25519).exchange(
        X25519PrivateKey.from_private_bytes(ephemeral).public_key()
    )
    came: Counter[str] = Counter()
    for vector in vectors("mlkem_768"):
        seed = vector["seed"] + OTHER_X25519
        if len(vector["seed"]) != 64:
            # Also the one of 96 bytes, as long as an HPKE seed: with the other half it is longer.
            with pytest.raises(ValueError, match="96 bytes"):
                hpke.private_key(seed)
            came["seed's length refused"] += 1
            continue
        assert hpke.public_bytes(seed)[:-32] == vector["ek"], vector
        assert can_be_sealed_to(vector["ek"] + own), vector
        secret = vector["K"] if vector.result == "valid" else bytes(32)
        sealed = sealed_by_hand(secret, vector["c"], agreed, sent, own)
        opened = unseals(seed, sealed)
        assert opened == (vector.result == "valid"), vector
        came["opened" if opened else "ciphertext's length refused"] += 1
    assert came == {"opened": 153, "ciphertext's length refused": 20, "seed's length refused": 20}


def test_expanded_ml_kem_keys_are_no_keys_of_ours() -> None:
    """Keys are seeds, so what an expanded key can hide (a wrong hash, another public key) cannot
    come about. The encapsulation keys beside them are good ones."""
    came: Counter[str] = Counter()
    for vector in vectors("mlkem_768_semi_expanded_decaps"):
        for raw in (vector["dk"], vector["dk"] + OTHER_X25519):
            with pytest.raises(ValueError, match="96 bytes"):
                hpke.private_key(raw)
        assert can_be_sealed_to(vector["ek"] + x25519_public(OTHER_X25519)), vector
        came[vector.result] += 1
    assert came == {"valid": 3, "invalid": 6}


def test_encapsulation_keys_above_the_modulus_are_refused() -> None:
    """FIPS 203's check of an encapsulation key, for which the files have no vector."""
    good = hpke.public_bytes(OTHER_MLKEM + OTHER_X25519)
    for coefficient in (3329, 4095):
        low, middle = coefficient & 0xFF, (good[1] & 0xF0) | coefficient >> 8
        with pytest.raises(WireError, match="bad-key"):
            hpke.public_key(bytes((low, middle)) + good[2:])


def test_ed25519() -> None:
    """Each key passes the product's own check, and none of the signatures verifies as one that
    the product would ask for: their messages have no label."""
    came: Counter[tuple[str, str]] = Counter()
    for vector in vectors("ed25519"):
        key = signature.public_key(bytes.fromhex(vector.group["publicKey"]["pk"]))
        try:
            key.verify(vector["sig"], vector["msg"])
            became = "verified"
        except InvalidSignature:
            became = "refused"
        came[vector.result, became] += 1
        for purpose in Purpose:
            assert (
                reason_of(signature.verify, key, purpose, vector["msg"], vector["sig"])
                == "bad-signature"
            )
    assert came == {("valid", "verified"): 88, ("invalid", "refused"): 63}


def test_a_signature_of_ours_cannot_be_written_in_another_way() -> None:
    """Malleability, as in the file, of a signature with a label: S plus the group's order, other
    lengths, and halves of nothing."""
    order = 2**252 + 27742317777372353535851937790883648493
    key = key_from("signer")
    signed = signature.sign(key, Purpose.MANIFEST, b"m")
    signature.verify(key.public_key(), Purpose.MANIFEST, b"m", signed)
    number = int.from_bytes(signed[32:], "little")
    others = [
        signed[:32] + (number + times * order).to_bytes(32, "little")
        for times in range(1, 16)
        if number + times * order < 2**256
    ]
    others += [signed + b"\x00", signed[:-1], signed[:32] + bytes(32), bytes(32) + signed[32:]]
    assert len(others) > 10
    for other in others:
        with pytest.raises(WireError, match="bad-signature"):
            signature.verify(key.public_key(), Purpose.MANIFEST, b"m", other)


def test_chacha20_poly1305() -> None:
    """Opened by the function that opens manifests and chunks, sealed by the class that all use.

    Nonces of another length than 12 bytes never occur: they are made here, not received."""
    came: Counter[tuple[str, str]] = Counter()
    for vector in vectors("chacha20_poly1305"):
        key, nonce, sealed = vector["key"], vector["iv"], vector["ct"] + vector["tag"]
        if vector.group["ivSize"] != 96:
            with pytest.raises(ValueError, match="Nonce must be 12 bytes"):
                broadcast._decrypt(key, nonce, sealed, vector["aad"])
            came[vector.result, "another nonce's length refused"] += 1
            continue
        made = ChaCha20Poly1305(key).encrypt(nonce, vector["msg"], vector["aad"])
        assert (made == sealed) == (vector.result == "valid"), vector
        try:
            assert broadcast._decrypt(key, nonce, sealed, vector["aad"]) == vector["msg"], vector
            came[vector.result, "opened"] += 1
        except WireError as error:
            assert error.reason == "bad-tag"
            came[vector.result, "refused"] += 1
    assert came == {
        ("valid", "opened"): 256,
        ("invalid", "refused"): 60,
        ("invalid", "another nonce's length refused"): 9,
    }


def test_hkdf_sha256_in_both_forms() -> None:
    """At once, as for answers, broadcasts and cohorts; and extracted by HMAC first, as for
    sessions. No salt and an empty one are the same."""
    came: Counter[tuple[str, str]] = Counter()
    for vector in vectors("hkdf_sha256"):
        length = int(vector.fields["size"])
        salt, info = vector["salt"], vector["info"]
        extracted = hmac.digest(salt, vector["ikm"], "sha256")
        try:
            at_once = HKDF(algorithm=SHA256(), length=length, salt=salt or None, info=info)
            in_steps = HKDFExpand(algorithm=SHA256(), length=length, info=info)
            derived = {at_once.derive(vector["ikm"]), in_steps.derive(extracted)}
            assert derived == {vector["okm"]}, vector
            came[vector.result, "derived"] += 1
        except ValueError:
            with pytest.raises(ValueError, match="larger than 8160"):
                HKDFExpand(algorithm=SHA256(), length=length, info=info)
            came[vector.result, "refused"] += 1
    assert came == {("valid", "derived"): 83, ("invalid", "refused"): 3}


def test_hmac_sha256_whole_and_cut() -> None:
    """Cut to 16 bytes as admission tags are, whole as proofs are; by both of the names that the
    product calls it by. Keys of 65 bytes (6 vectors) it has none."""
    came: Counter[tuple[int, str, bool]] = Counter()
    for vector in vectors("hmac_sha256"):
        size = vector.group["tagSize"] // 8
        assert size == len(vector["tag"])
        made = {
            hmac.digest(vector["key"], vector["msg"], name)[:size]
            for name in (hashlib.sha256, "sha256")
        }
        assert len(made) == 1
        same = hmac.compare_digest(made.pop(), vector["tag"])
        came[len(vector["key"]), vector.result, same] += 1
    assert came == {
        (32, "valid", True): 54,
        (32, "invalid", False): 108,
        (16, "valid", True): 6,
        (65, "valid", True): 6,
    }


PRIMITIVES = {
    "asymmetric.ed25519",
    "asymmetric.mlkem",
    "asymmetric.x25519",
    "ciphers.aead.ChaCha20Poly1305",
    "hashes.SHA256",
    "hpke",
    "kdf.hkdf",
}


def test_the_product_calls_no_other_primitive() -> None:
    """What is added here needs vectors above."""
    found: set[str] = set()
    for package in ("device_sdk", "aggregator", "export"):
        for path in Path(package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                assert not isinstance(node, ast.Import) or not any(
                    each.name.startswith("cryptography") for each in node.names
                ), f"{path} imports a whole module of cryptography"
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    "cryptography.hazmat.primitives"
                ):
                    module = str(node.module).removeprefix("cryptography.hazmat.primitives.")
                    found |= {f"{module}.{each.name}" for each in node.names}
    named = {name if name in PRIMITIVES else name.rpartition(".")[0] for name in found}
    assert named == PRIMITIVES
