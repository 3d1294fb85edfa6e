"""Every decoder takes its seeds, and everything that ever broke one stays mended."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import __main__ as program
from tests.fuzz import corpus
from tests.fuzz.target import Target
from tests.fuzz.targets import all_targets

TARGETS = all_targets()
# Their seeds are not whole messages: what is fuzzed is how they are refused.
_REFUSE_THEIR_SEEDS = {"answer", "chunks", "envelope", "inside", "publication"}
_REFUSE_THEIR_SEEDS |= {"sessions", "unsealed-open", "unsealed-request"}


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_what_was_kept_is_refused_or_taken(target: Target) -> None:
    for data in corpus.read(target.name):
        target(data)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_seeds_are_whole(target: Target) -> None:
    seeds = target.seeds()
    assert seeds
    for seed in seeds:
        taken = target(seed)
        assert taken or target.name in _REFUSE_THEIR_SEEDS


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_seeds_with_a_few_bytes_changed(target: Target) -> None:
    rng = random.Random(target.name)
    for seed in target.seeds():
        for _ in range(60):
            data = bytearray(seed[: target.most_bytes])
            for _ in range(rng.randint(1, 4)):
                place = rng.randrange(len(data))
                match rng.randrange(4):
                    case 0:
                        data[place] = rng.randrange(256)
                    case 1:
                        data[place] ^= 1 << rng.randrange(8)
                    case 2:
                        del data[place:]
                    case _:
                        data[place:place] = rng.randbytes(rng.randint(1, 8))
                if not data:
                    break
            target(bytes(data))


@given(name=st.sampled_from(sorted(TARGETS)), data=st.binary(max_size=300))
def test_any_bytes(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.slow
def test_inputs_that_reach_the_most_code_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("atheris")
    monkeypatch.setattr(corpus, "_FOLDER", tmp_path / "corpus")
    seeds = TARGETS["receipt"].seeds()
    found = tmp_path / "work" / "receipt"
    found.mkdir(parents=True)
    for number, seed in enumerate(seeds):
        (found / str(number)).write_bytes(seed)
    monkeypatch.setattr(program, "_MERGE_SECONDS", 0.01)
    assert not program._keep("receipt", tmp_path / "work")
    assert corpus.read("receipt") == []
    monkeypatch.undo()
    monkeypatch.setattr(corpus, "_FOLDER", tmp_path / "corpus")
    assert program._keep("receipt", tmp_path / "work")
    kept = corpus.read("receipt")
    assert kept and set(kept) <= set(seeds)


@pytest.mark.slow
def test_a_fuzzer_runs_though_its_parent_had_much_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    line = [sys.executable, "-m", "tests.fuzz.one_target", "topic", str(tmp_path), "-runs=1"]
    holds = f"len(b'x' * (1 << 30))\nimport subprocess, sys\nsys.exit(subprocess.call({line}))"
    ended = subprocess.run([sys.executable, "-c", holds], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-1000:]


@pytest.mark.slow
def test_a_run_that_is_stopped_keeps_its_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("atheris")
    real = program._fuzz

    def stopped_at_the_second(name: str, seconds: float, work: Path, seed: int) -> program.Outcome:
        if name == "url":
            raise KeyboardInterrupt
        return real(name, seconds, work, seed)

    monkeypatch.setattr(program, "_fuzz", stopped_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        program.main(["--targets", "topic,url", "--minutes", "0.03", "--work", str(tmp_path)])
    assert json.loads((tmp_path / "executions.json").read_text())["topic"] > 0
