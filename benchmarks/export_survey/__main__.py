"""`make export-survey`: models that others wrote, exported, verified, trained beside torch."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.export_survey.steps import subjects
from benchmarks.export_survey.subject import Subject
from benchmarks.export_survey.survey import (
    BEFORE,
    OURS,
    TORCH,
    Outcome,
    Run,
    Settings,
    Training,
    measure,
    sources,
)
from benchmarks.harness import RESULTS, StoredRuns, markdown_table, progress_line, suite_parser

BEGIN, END = "<!-- made by make export-survey -->", "<!-- end -->"

Found = Mapping[str, Outcome | None]


def report(subjects: Sequence[Subject], found: Found, *, against: bool = False) -> str:
    """A summary of the kinds, a row a subject that was run, and what was not right."""
    run = [one for one in subjects if found.get(one.name) is not None or one.missing]
    left = len(subjects) - len(run)
    parts = [
        _kinds(subjects, found, against),
        f"{left} of {len(subjects)} models were not run yet." if left else "",
        _rows(run, found, against) if run else "",
        _said(run, found),
    ]
    return "\n\n".join(part for part in parts if part)


def page(file: Path, subjects: Sequence[Subject], found: Found) -> None:
    """Replace what stands between the page's markers by a summary; a page for each kind beside.

    The page of a kind lies in the folder of the page's name, and is made whole.
    """
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file} has no lines {BEGIN} and {END}")
    kinds = _kinds(subjects, found, against=False, folder=file.stem)
    left = sum(found.get(one.name) is None and not one.missing for one in subjects)
    parts = [
        kinds,
        f"{left} of {len(subjects)} models were not run yet." if left else "",
        _said(subjects, found),
    ]
    text = "\n\n".join(part for part in parts if part)
    file.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
    folder = file.with_suffix("")
    folder.mkdir(exist_ok=True)
    for kind in dict.fromkeys(subject.kind for subject in subjects):
        run = [one for one in subjects if one.kind == kind and found.get(one.name) is not None]
        if run:
            text = (
                f"# What exports: {kind}\n\nMade by `make export-survey`; [what the columns say]"
                f"(../{file.name}).\n\n{_rows(run, found, against=False, one_kind=True)}\n"
            )
            (folder / _page_of(kind)).write_text(text, encoding="utf-8")


def _page_of(kind: str) -> str:
    return f"{kind.lower().replace(' ', '-')}.md"


def verdict(subject: Subject, found: Found, contender: str = OURS) -> str:
    """In a word or two."""
    outcome = found.get(subject.name)
    if outcome is None or contender not in outcome.exporting:
        return f"no {subject.package}" if subject.missing else "not run"
    return outcome.exporting[contender].verdict


def _kinds(subjects: Sequence[Subject], found: Found, against: bool, folder: str = "") -> str:
    """A row a kind; with a folder, a link to the page of its models there."""
    kinds = list(dict.fromkeys(subject.kind for subject in subjects))
    groups = {kind: [one for one in subjects if one.kind == kind] for kind in kinds}
    if len(kinds) > 1:
        groups["all"] = list(subjects)
    headers = ["kind", "right", "times torch: median (range)"]
    if against:
        headers += ["before: right", "times torch", "ours times before"]
    lines = []
    for kind, some in groups.items():
        linked = folder and kind in kinds
        name = f"[{kind}]({folder}/{_page_of(kind)})" if linked else kind
        line = [name, *_summary(some, found, OURS)]
        if against:
            line += [*_summary(some, found, BEFORE), _medians(some, found, OURS, BEFORE)]
        lines.append(line)
    return markdown_table(lines, headers)


def _summary(subjects: Sequence[Subject], found: Found, contender: str) -> list[str]:
    tried = [one for one in subjects if found.get(one.name) is not None]
    right = [one for one in tried if verdict(one, found, contender) == "right"]
    return [f"{len(right)}/{len(tried)}", _medians(right, found, contender, TORCH)]


def _medians(subjects: Sequence[Subject], found: Found, contender: str, against: str) -> str:
    """Over the subjects, of each one's median ratio: the median and the range."""
    ratios = [
        statistics.median(turns)
        for one in subjects
        if (outcome := found.get(one.name)) and (turns := outcome.ratios(contender, against))
    ]
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _rows(subjects: Sequence[Subject], found: Found, against: bool, one_kind: bool = False) -> str:
    headers = [
        "kind", "model", "from", "verdict", "export s", "open s: ours, torch", "peak MiB: ours, "
        "torch", "step ms: ours, torch", "times torch: lowest, median",
    ]  # fmt: skip
    if against:
        headers += ["before: verdict", "export s", "open s", "peak MiB", "times: lowest, median"]
    lines = []
    for subject in subjects:
        line = [subject.kind, subject.name, subject.package or "torch", verdict(subject, found)]
        outcome = found.get(subject.name) or Outcome("")
        exporting = outcome.exporting.get(OURS)
        line.append(f"{exporting.seconds:.1f}" if exporting and exporting.nodes else "-")
        line.append(_both(outcome, lambda one: f"{one.opening_seconds:.2f}"))
        line.append(_both(outcome, lambda one: f"{one.peak_mib:.0f}"))
        line.append(_both(outcome, lambda one: f"{statistics.median(one.turns) * 1e3:.2f}"))
        line.append(_least(outcome.ratios()))
        if against:
            line += _before(subject, found, outcome)
        lines.append(line)
    first = 1 if one_kind else 0
    return markdown_table([line[first:] for line in lines], headers[first:])


def _before(subject: Subject, found: Found, outcome: Outcome) -> list[str]:
    exporting, training = outcome.exporting.get(BEFORE), outcome.training.get(BEFORE)
    return [
        verdict(subject, found, BEFORE),
        f"{exporting.seconds:.1f}" if exporting and exporting.nodes else "-",
        f"{training.opening_seconds:.2f}" if training else "-",
        f"{training.peak_mib:.0f}" if training else "-",
        _least(outcome.ratios(OURS, BEFORE)),
    ]


def _both(outcome: Outcome, shown: Callable[[Training], str]) -> str:
    """Ours and torch's."""
    if OURS not in outcome.training:
        return "-"
    return ", ".join(shown(outcome.training[name]) for name in (OURS, TORCH))


def _least(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}, {statistics.median(ratios):.2f}" if ratios else "-"


def _said(subjects: Sequence[Subject], found: Found) -> str:
    """Why whatever is not right is not."""
    lines = []
    for subject in subjects:
        outcome = found.get(subject.name)
        if outcome is None:
            if subject.missing:
                lines.append(f"* {subject.name}: left out, {subject.package} is not installed")
            continue
        for name, one in outcome.exporting.items():
            if one.verdict != "right":
                said = " ".join(one.said.strip().splitlines()[-1:])
                who = "" if name == OURS else f" ({name})"
                lines.append(f"* {subject.name}{who}: {one.verdict}: {said}")
        if outcome.said:
            lines.append(f"* {subject.name}: not timed: {outcome.said.strip().splitlines()[-1]}")
    return "\n".join(lines)


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
