"""Searches every model and says what was found: ``make models``.

Each row is one model under one rule, judged by one property. Under an old rule, or with a "what
if", a violation has to be found; under the rule in force none may be. Needs spin and a C compiler.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
_MOST_SECONDS = 900
_MEGABYTES = 4000
LIVES = "LIVES"
"""What a model's formula in linear temporal logic is called, where it has one."""


@dataclass(frozen=True)
class Check:
    """One search. ``settings`` are the model's macros; a violation must be found if ``finds``."""

    model: str
    rule: str
    prop: str
    settings: tuple[str, ...] = ()
    finds: bool = False
    thorough: bool = False
    """Takes longer than a few seconds: left out with ``--quick``."""
    brief: bool = False
    """One of the few with ``--brief``: what was broken is found, and is mended."""

    @property
    def is_live(self) -> bool:
        """Whether the property is a formula over whole runs, and not one of assertions."""
        return self.prop == LIVES

    @property
    def macros(self) -> list[str]:
        """What spin is given."""
        rules = {"old": ("OLD_RULE",), "in force": ()}.get(self.rule, (self.rule,))
        judged = () if self.prop == "all" else (f"CHECK={self.prop}",)
        if self.is_live:
            judged = ("CHECK=99", "LTL")
        return [f"-D{each}" for each in (*rules, *self.settings, *judged)]


def _old(model: str, prop: str, *settings: str, brief: bool = False) -> Check:
    return Check(model, "old", prop, settings, finds=True, brief=brief)


def _what_if(model: str, rule: str, prop: str, *settings: str, brief: bool = False) -> Check:
    return Check(model, rule, prop, settings, finds=True, brief=brief)


def _new(
    model: str, *settings: str, prop: str = "all", thorough: bool = False, brief: bool = False
) -> Check:
    return Check(model, "in force", prop, settings, thorough=thorough, brief=brief)


_STEADY = ("SET_BACKS=0", "CRASHES=0")
_ONE_STEP = ("STEPS=1", "MOST=2")

CHECKS = (
    _old("ledger", "NO_FALSE_VERDICT", "ROUNDS=1", "RESTORES=0", brief=True),
    _new("ledger", "ROUNDS=2", "RESTORES=0", prop="EXACTLY_ONCE"),
    _new("ledger", "ROUNDS=2", "RESTORES=0", prop="NO_FALSE_VERDICT", brief=True),
    _new("ledger", "ROUNDS=2", "RESTORES=0", prop="ONE_BODY"),
    _new("ledger", "ROUNDS=3", "RESTORES=0"),
    _new("ledger", "ROUNDS=1", "RESTORES=1"),
    _new("ledger", "ROUNDS=2", "RESTORES=1", thorough=True),
    _new("ledger", "ROUNDS=2", "RESTORES=0", prop=LIVES),
    _what_if("ledger", "SILENT", LIVES, "ROUNDS=1", "RESTORES=0"),
    _what_if("ledger", "TWO_TRANSACTIONS", "EXACTLY_ONCE", "ROUNDS=1", "RESTORES=0"),
    _what_if("ledger", "FICKLE", "NO_FALSE_VERDICT", "ROUNDS=1", "RESTORES=0"),
    _old("opens", "COSTS_ONCE", *_STEADY, "OPENS=4"),
    _old("opens", "KEEPS_ITS_PLACE", *_STEADY, "OPENS=4"),
    _old("opens", "NO_LOCK_OUT", *_STEADY, "OPENS=4", brief=True),
    _new("opens", *_STEADY, "OPENS=5", prop="COSTS_ONCE"),
    _new("opens", *_STEADY, "OPENS=5", prop="KEEPS_ITS_PLACE"),
    _new("opens", *_STEADY, "OPENS=5", prop="NO_LOCK_OUT", brief=True),
    _new("opens", "SET_BACKS=1", "CRASHES=0", "DEATHS=0", "OPENS=5"),
    _new("opens", "SET_BACKS=1", "CRASHES=1", "DEATHS=1", "OPENS=5", thorough=True),
    _new("opens", "SET_BACKS=0", "CRASHES=1", "DEATHS=2", "OPENS=6", thorough=True),
    _what_if("opens", "REFILL=1", "NO_LOCK_OUT", *_STEADY, "DEATHS=0", "TOKENS=2", "OPENS=5"),
    Check(
        "opens", "MARK_BEFORE_TOKEN", "all",
        (*_STEADY, "DEATHS=0", "TOKENS=2", "OPENS=5", "REFILL=1"),
    ),
    _old("presence", "FINDS_THE_LIFE"),
    _what_if("presence", "BY_CALENDAR", "FINDS_THE_LIFE"),
    _new("presence", "LIVES=4"),
    _old("waiting", "BOUNDED", brief=True),
    _new("waiting", prop="BOUNDED", brief=True),
    _new("waiting", prop="LIVES_ON"),
    _new("waiting", "ROUNDS=100", thorough=True),
    _what_if("waiting", "PERCENTILE", "LIVES_ON"),
    _old("keys", "NO_OLD_ENROLMENT", brief=True),
    _old("keys", "NO_OLD_SERVICE"),
    _old("keys", "NOTHING_TO_STEAL"),
    _new("keys", prop="NO_OLD_ENROLMENT", brief=True),
    _new("keys", prop="NO_OLD_SERVICE"),
    _new("keys", prop="NOTHING_TO_STEAL"),
    _new("keys", prop="TIME_IS_BOUNDED"),
    _new("keys", prop="IS_SERVED"),
    _what_if("keys", "RUNS_ON", "IS_SERVED"),
    _what_if("keys", "in force", "ENDS_BY_ITSELF"),
    _new("keys", "TIMES=8", "DESCRIPTORS=4", thorough=True),
    _what_if("keys", "DELEGATE_TOO", "TIME_IS_BOUNDED"),
    _what_if("keys", "DELEGATE_TOO", "IS_SERVED"),
    *(
        _what_if("clock", rule, prop, *_ONE_STEP, brief=prop == LIVES)
        for rule in ("RUNS_ON", "ABSOLUTE", "ACROSS")
        for prop in ("AT_ONCE", LIVES)
    ),
    _new("clock", *_ONE_STEP, brief=True),
    _new("clock", *_ONE_STEP, prop=LIVES, brief=True),
    _new("clock", "STEPS=2", "MOST=2", thorough=True),
    _new("clock", "STEPS=2", "MOST=2", prop=LIVES, thorough=True),
    _what_if("clock", "NO_SERIALS", "KEYS_END", *_ONE_STEP),
    _old("roots", "FOLLOWS"),
    _new("roots", prop="FOLLOWS"),
    _new("roots", prop="NEVER_BACK"),
    _what_if("roots", "LINKS=2", "FOLLOWS"),
    _what_if("roots", "in force", "ONE_KEEPS_FAITH"),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a search came to. ``trail``: the steps of the shortest violation, in words."""

    violated: bool
    complete: bool
    states: int
    depth: int
    seconds: float
    trail: tuple[str, ...] = ()


class SearchError(Exception):
    """A model that cannot be searched; says why."""


def search(check: Check) -> Found:
    """Search all states, breadth first where a violation is expected: it is the shortest then."""
    with tempfile.TemporaryDirectory(prefix="tessera-models-") as name:
        folder = Path(name)
        for file in HERE.glob("*.pml"):
            shutil.copy(file, folder)
        model = f"{check.model}.pml"
        _run(["spin", *check.macros, "-a", model], folder)
        how = ["-DSAFETY", "-DBFS" if check.finds else "-DCOLLAPSE"]
        if check.is_live:
            how = ["-DCOLLAPSE"]
        _run(["cc", "-O1", "-w", f"-DMEMLIM={_MEGABYTES}", *how, "-o", "pan", "pan.c"], folder)
        began = time.monotonic()
        text = _run(["./pan", "-m1000000", *(["-a"] if check.is_live else [])], folder)
        seconds = time.monotonic() - began
        trail: tuple[str, ...] = ()
        if (folder / f"{model}.trail").exists() and not check.is_live:
            played = _run(["spin", *check.macros, "-t", model], folder)
            trail = tuple(re.findall(r"^ {6}(\S.*\w: .*)$", played, re.MULTILINE))
    errors = re.search(r"errors: (\d+)", text)
    states = re.search(r"(\d+) states, stored", text)
    depth = re.search(r"depth reached (\d+)", text)
    if errors is None or states is None or depth is None:
        raise SearchError(f"{check.model}: the search said nothing that could be read:\n{text}")
    violated = ("acceptance cycle (" if check.is_live else "assertion violated") in text
    if errors[1] != "0" and not violated:
        raise SearchError(f"{check.model}: the search ended otherwise than by a property:\n{text}")
    cut = "max search depth too small" in text or "Search not completed" in text
    return Found(violated, not cut, int(states[1]), int(depth[1]), seconds, trail)


def _run(command: Sequence[str], folder: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise SearchError(f"{' '.join(command)} took more than {_MOST_SECONDS} s") from None
    if command[0] != "./pan" and done.returncode != 0:
        raise SearchError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the searches; 0 if each came to what it has to."""
    parser = argparse.ArgumentParser(prog="make models", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out the long searches")
    parser.add_argument(
        "--brief", action="store_true", help="what was broken, and that it is mended"
    )
    parser.add_argument("--model", help="this model's searches alone")
    parser.add_argument(
        "--trails", action="store_true", help="tell the shortest way to each violation"
    )
    options = parser.parse_args(arguments)
    for tool, package in (("spin", "spin"), ("cc", "gcc")):
        if shutil.which(tool) is None:
            print(f"{tool} is missing: install it (apt-get install {package})", file=sys.stderr)
            return 2
    wanted = [
        each
        for each in CHECKS
        if (options.model is None or each.model == options.model)
        and not (options.quick and each.thorough)
        and (each.brief or not options.brief)
    ]
    if not wanted:
        print(f"there is no model {options.model!r}", file=sys.stderr)
        return 2
    print("| model | rule | property | bounds | states | depth | s | found | |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    wrong = 0
    for check in wanted:
        try:
            found = search(check)
        except SearchError as error:
            print(error, file=sys.stderr)
            wrong += 1
            continue
        right = found.violated == check.finds and (found.violated or found.complete)
        wrong += not right
        print(
            f"| {check.model} | {check.rule} | {check.prop} | {' '.join(check.settings)} "
            f"| {found.states:,} | {found.depth:,} | {found.seconds:.1f} "
            f"| {'a violation' if found.violated else 'none'} | {'' if right else 'WRONG'} |",
            flush=True,
        )
        if options.trails and found.trail:
            print("\n".join(("", *(f"    {step}" for step in found.trail), "")), flush=True)
    print(f"\n{len(wanted) - wrong} of {len(wanted)} searches came to what they have to")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
