"""No key ever meets a nonce twice: both directions and broadcasts, over many restarts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from device_sdk.wire.seal import session
from tests.attacks.nonce_ledger import NonceLedger, modules_that_seal
from tests.attacks.restarts import make_restart_stage, restart_often
from tests.faults.oracle import judge

RESTARTS = 60


def test_all_sealing_passes_the_ledger() -> None:
    root = Path(__file__).parents[2]
    cipher = re.compile(r"\b(ChaCha20Poly1305|AESGCM|AESCCM|AESSIV|AESOCB3|Fernet|Cipher)\b")
    found = {
        str(path.relative_to(root).with_suffix("")).replace("/", ".")
        for package in ("device_sdk", "aggregator", "export")
        for path in (root / package).rglob("*.py")
        if cipher.search(path.read_text())
    }
    assert found == set(modules_that_seal())


def test_no_key_meets_a_nonce_twice_over_restarts_in_publications(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = NonceLedger(monkeypatch)
    stage = make_restart_stage(memory_path)
    figures = restart_often(stage, ledger, RESTARTS, seed=17)
    stage.close()
    judge(stage.fleet)
    assert figures.in_publications > RESTARTS / 4
    assert figures.sealed > RESTARTS and figures.encapsulated > RESTARTS / 4
    assert figures.reused == 0
    assert ledger.sealed_in == set(modules_that_seal())


def test_the_ledger_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = NonceLedger(monkeypatch)
    keys = session.DirectionKeys(bytes(32), bytes(12))
    for _ in range(2):
        cipher = session.EnvelopeCipher(keys, session.Direction.UP)
        cipher.seal(16, bytes(8), 7, b"the counter was restored from a backup")
    assert len(ledger.reused) == 1
