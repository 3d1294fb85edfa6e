"""``python -m benchmarks.robust``: what hostile devices do to a model, and what helps."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.command_line import add_run_options, seeds_of
from benchmarks.data_folder import data_folder
from benchmarks.progress_line import progress_line
from benchmarks.recommendation.given_splits import has_times, load_split
from benchmarks.recommendation.split import LeaveOneOut, hold_out_validation
from benchmarks.robust.execute import execute
from benchmarks.robust.hostile import ATTACKS, Attack
from benchmarks.robust.outcome import Outcome, OutcomeStore
from benchmarks.robust.table import accuracy_table, exposure_table
from benchmarks.robust.trial import OPTIONS, SHARES, Option, Trial, base_experiment
from benchmarks.scatter.full_round import open_step
from device_sdk.learners.factor_step import FactorStep

_RESULTS = Path(__file__).resolve().parent.parent / "results" / "robust"
_DATA = "ml-100k"
# Of the validation items and their negatives: the same for every setting that is compared.
_VALIDATION_SEED = 12345

_DESCRIPTION = """\
Trains ML-100K's 943 devices of unequal size with the real learners, method and train graph, with 0,
5 and 20 % of the devices hostile: they send ten times the opposite of what they found (flip), noise
of ten times its norm (noise), or push one unpopular item into everybody's recommendations, ten
times as hard as their largest row (promotion) or just as hard (patient). Prints HR@10 of the honest
users for each defence, and how many of them are recommended the promoted item.

One run takes about 100 s of a free core; a defence has a clean run and eight attacked ones a seed.
Every finished run is stored under its settings, so a benchmark that was stopped continues where it
was, and --table-only prints what is there.
"""
_EXAMPLES = """\
examples:
  python -m benchmarks.robust --seeds 3
  python -m benchmarks.robust --options "none;guarded" --attacks promotion --shares 0.05
  python -m benchmarks.robust --split validation --epochs 20   (a quick look, to choose settings)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parse(arguments)
    chosen = _named(options.options, [one.name for one in OPTIONS], "--options")
    named = _named(options.attacks, ATTACKS, "--attacks")
    attacks = [attack for attack in ATTACKS if attack in named]
    defences = [one for one in OPTIONS if one.name in chosen]
    store = OutcomeStore(options.results)
    found: dict[tuple[str, str, float], dict[int, Outcome]] = {}
    runner = _Runner(options)
    # Seeds outside: what is stopped early has all defences on the first seeds.
    for seed in seeds_of(options):
        for defence, attack, share in _cases(defences, attacks, options.shares):
            experiment = base_experiment(options.split, seed, defence, options.epochs)
            trial = Trial(experiment, attack, share)
            words = f"{share:.0%} {attack}" if attack else "clean"
            run = partial(runner.run, trial, f"seed {seed}, {defence.name}, {words}")
            outcome = store.found_or_made(trial, None if options.table_only else run)
            if outcome is not None:
                found.setdefault((defence.name, attack or "", share), {})[seed] = outcome
    names = [defence.name for defence in defences]
    print(f"\n{_DATA}, {options.split} items\n\n{accuracy_table(found, names)}\n")
    print(exposure_table(found, names))
    return 0


class _Runner:
    """Loads the data and the train graph once, when the first run needs them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._loaded: tuple[LeaveOneOut, FactorStep] | None = None

    def run(self, trial: Trial, label: str) -> Outcome:
        """Carry out one trial, with its progress on standard error."""
        if self._loaded is None:
            split = _load(self._options.root, self._options.split)
            self._loaded = (split, open_step(self._options.artifact))
        split, step = self._loaded
        with progress_line(label) as progress:
            return execute(trial, split, step, progress)


def _cases(
    defences: Sequence[Option], attacks: Sequence[Attack], shares: Sequence[float]
) -> Iterator[tuple[Option, Attack | None, float]]:
    for defence in defences:
        yield defence, None, 0.0
        for share in shares:
            for attack in attacks:
                yield defence, attack, share


def _named(given: str | None, known: Sequence[str], flag: str) -> list[str]:
    if given is None:
        return list(known)
    names = [name.strip() for name in given.split(";")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"{flag}: unknown name {unknown[0]!r}; known are: {'; '.join(known)}")
    return names


def _load(given: Path | None, kind: str) -> LeaveOneOut:
    root = data_folder(given, "ml-100k/leave_one_out")
    whole = load_split(root, _DATA)
    if kind == "test":
        return whole
    rng = np.random.default_rng(_VALIDATION_SEED)
    return hold_out_validation(whole.train, whole.items, rng, latest=has_times(_DATA))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.robust",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + "\noptions:\n" + "\n".join(f"  {o.name:11} {o.shows}" for o in OPTIONS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    parser.add_argument("--options", help="names of defences, separated by semicolons")
    parser.add_argument("--attacks", help=f"of {', '.join(ATTACKS)}, separated by semicolons")
    parser.add_argument(
        "--shares", type=float, nargs="+", choices=SHARES, default=SHARES, metavar="SHARE"
    )
    add_run_options(parser, _RESULTS, seeds=1)
    parser.add_argument("--epochs", type=int, default=0, help="fewer passes, for a quick look")
    parser.add_argument("--artifact", type=Path, help="another factorisation artifact's folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
