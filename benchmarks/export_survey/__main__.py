"""`make export-survey`: exports, verifies and trains models that others wrote, beside torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.export_survey.steps import subjects
from benchmarks.export_survey.subject import Subject
from benchmarks.export_survey.survey import Outcome, Run, Settings, measure, sources
from benchmarks.export_survey.table import page, report, verdict
from benchmarks.harness import RESULTS, StoredRuns, progress_line, suite_parser

_REQUIREMENTS = "benchmarks/export_survey/requirements.txt"
_EPILOG = f"""Outcomes are stored a model at a time: stopped, it goes on where it was. One that was
found with other code of the exporter, the device runtime or the model is found anew.

Models come from torchvision, timm, transformers, peft, segmentation-models-pytorch,
torch-geometric and deepctr-torch (pip install -r {_REQUIREMENTS}); those
of a package that is not there are left out, and the table says so. Weights are random: nothing is
loaded. Where not one of the models that were asked for could be run, the exit status is 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is to be measured, print the table and write it into the page.

    2 where nothing could be run, 1 where a model that was asked for is not right, else 0.
    """
    options = _parser().parse_args(arguments)
    settings = Settings(
        limit_seconds=options.limit,
        timed=not options.quick,
        against=options.against,
        verified=not options.unverified,
        turn_seconds=options.seconds,
    )
    store = StoredRuns(options.results, "export_survey", Outcome)
    everything = subjects()
    chosen = [
        one
        for one in everything
        if options.only.lower() in one.name.lower() and options.kind.lower() in one.kind.lower()
    ]
    if not options.table_only:
        try:
            for number, subject in enumerate(chosen, 1):
                label = f"[{number}/{len(chosen)}] {subject.name}"
                _measured(subject, settings, store, label, options.again)
        except KeyboardInterrupt:
            print("stopped; what was measured is stored", file=sys.stderr)
    left_out = [one for one in chosen if one.missing]
    if left_out and not options.table_only:
        print(
            f"{len(left_out)} of {len(chosen)} models were left out, whose packages are not "
            f"installed: pip install -r {_REQUIREMENTS}",
            file=sys.stderr,
        )
        if len(left_out) == len(chosen):
            return 2
    if not chosen:
        print("no model has such a name and kind: see --only and --kind", file=sys.stderr)
        return 2
    found = {one.name: store.load(_run(one, settings)) for one in everything}
    print(report(chosen, found, against=settings.against is not None))
    if not (options.quick or options.against or options.unverified):
        page(options.page, everything, found)
    run = [one for one in chosen if not one.missing]
    return int(any(verdict(one, found) != "right" for one in run))


def _parser() -> argparse.ArgumentParser:
    parser = suite_parser("export_survey", __doc__ or "", _EPILOG)
    parser.add_argument("--only", metavar="TEXT", default="", help="models whose name holds TEXT")
    parser.add_argument("--kind", metavar="TEXT", default="", help="models whose kind holds TEXT")
    parser.add_argument("--quick", action="store_true", help="export and compare, time nothing")
    parser.add_argument(
        "--unverified", action="store_true", help="export without verification: the five steps only"
    )
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="time another checkout by turns with this"
    )
    parser.add_argument(
        "--limit", type=float, default=900.0, metavar="SECONDS", help="of an export (default: 900)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="of a turn; there are seven (default: 0.3)"
    )
    parser.add_argument("--again", action="store_true", help="measure what is stored, too")
    parser.add_argument("--table-only", action="store_true", help="print what is stored, run none")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where outcomes are stored")
    parser.add_argument(
        "--page",
        type=Path,
        default=Path("docs/export-coverage.md"),
        help="takes the summary between its markers; the models go into a folder beside it",
    )
    return parser


def _run(subject: Subject, settings: Settings) -> Run:
    return Run(
        subject.name,
        subject.kind,
        settings.timed,
        settings.against is not None,
        settings.verified,
    )


def _measured(
    subject: Subject,
    settings: Settings,
    store: StoredRuns[Run, Outcome],
    label: str,
    again: bool,
) -> None:
    run = _run(subject, settings)
    with progress_line(label) as say:
        if subject.missing:
            say(f"left out: no {subject.package}")
            return
        stored = store.load(run)
        if stored is not None and not again and stored.sources == sources(subject, settings):
            say("stored: " + ", ".join(one.verdict for one in stored.exporting.values()))
            return
        store.save(run, measure(subject, settings, say))


if __name__ == "__main__":
    sys.exit(main())
