"""Every sealing of the product, noted by key and nonce, in the one place that they all pass."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

import device_sdk.wire
from device_sdk.wire.seal import hpke


def modules_that_seal() -> list[str]:
    """Modules of the wire that hold the cipher; nothing else of the product may."""
    found = pkgutil.walk_packages(device_sdk.wire.__path__, "device_sdk.wire.")
    loaded = [importlib.import_module(module.name) for module in found]
    return [module.__name__ for module in loaded if hasattr(module, "ChaCha20Poly1305")]


class NonceLedger:
    """Counts sealings; ``reused`` has the (key, nonce) pairs that met two of them.

    HPKE derives its keys from an encapsulation of its own for each message: those must differ.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sealed = 0
        self.encapsulated = 0
        self.reused: list[tuple[bytes, bytes]] = []
        self._seen: set[bytes] = set()
        self.sealed_in: set[str] = set()
        """Modules that sealed anything."""
        for name in modules_that_seal():
            monkeypatch.setattr(f"{name}.ChaCha20Poly1305", self._noted(name))
        ledger = self
        suite = hpke._SUITE

        class NotedSuite:
            """HPKE's suite, but that it tells."""

            def encrypt(self, *values: Any, **named: Any) -> bytes:
                sealed: bytes = suite.encrypt(*values, **named)
                ledger.encapsulated += 1
                ledger.note(b"hpke", sealed[:1120])  # the encapsulation: ML-KEM-768 and X25519
                return sealed

            def decrypt(self, *values: Any, **named: Any) -> bytes:
                opened: bytes = suite.decrypt(*values, **named)
                return opened

        monkeypatch.setattr(hpke, "_SUITE", NotedSuite())

    def _noted(self, module: str) -> type:
        ledger = self

        class Noted:
            """The cipher, but that it tells."""

            def __init__(self, key: bytes) -> None:
                self._key, self._cipher = bytes(key), ChaCha20Poly1305(key)

            def encrypt(self, nonce: bytes, data: bytes, associated: bytes | None) -> bytes:
                ledger.note(self._key, bytes(nonce))
                ledger.sealed_in.add(module)
                return self._cipher.encrypt(nonce, data, associated)

            def decrypt(self, nonce: bytes, data: bytes, associated: bytes | None) -> bytes:
                return self._cipher.decrypt(nonce, data, associated)

        return Noted

    def note(self, key: bytes, nonce: bytes) -> None:
        """One sealing."""
        self.sealed += 1
        pair = key + nonce
        if pair in self._seen:
            self.reused.append((key, nonce))
        self._seen.add(pair)
