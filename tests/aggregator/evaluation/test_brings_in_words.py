"""What stands where a control arm's figure would: the same everywhere, and in words."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from aggregator.console.pages.learning import LEARNING
from aggregator.console.pages.page import PageQuery
from aggregator.evaluation import DeviceReport, Rules, summarise, what_it_brings
from aggregator.home import AggregatorHome
from aggregator.operate.fleet import Fleet
from aggregator.serve.service import Service
from device_sdk.evaluation.report import STAGES, Evaluation, EvaluationReport
from tests.aggregator.serve.test_live_and_metrics import shown
from tests.fakes.averaging import averaging_home
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import command
from tests.fakes.parts import parts_of

DEVICES = 12
UNASKED = "whether federation brings anything is not known: with control = 0.2"
NOBODY = "what federation brings is not known yet: 0 of the control arm's devices"
KNOWN = "federation brings 0."


def report(place: int, alone: bool) -> EvaluationReport:
    errors = zip(STAGES, (1.0, 0.9 + place / 100, 1.3), strict=True)
    found = [Evaluation(each, "mae", np.array([9.0, 9.0 * error])) for each, error in errors]
    return EvaluationReport(tuple(found[: 3 if alone else 2]), "", int(alone))


def home_with(folder: Path, control: float, arms: Sequence[int]) -> tuple[AggregatorHome, str]:
    """A home whose versions, from 0 on, so many devices with a model alone evaluated, and what the
    live view shows of it."""
    home = averaging_home(folder, "", f'[evaluation]\nmetrics = ["mae"]\ncontrol = {control}\n')
    linear_artifact(folder / "linear", "mae")
    parts = parts_of(home)
    for version, arm in enumerate(arms):
        reports = (DeviceReport("", report(each, each < arm)) for each in range(DEVICES))
        figures = summarise(reports, Rules(("mae",), 3))
        parts.store.first.evaluations.put(version, version + 1, figures)
    live = shown(Service(parts).snapshot())
    parts.store.database.close()
    return home, " ".join(live.replace("│", " ").split())


@pytest.mark.parametrize(
    ("control", "arms", "newest", "listed"),
    [
        (0.0, [0], "", UNASKED),  # nobody asked
        (0.001, [0], NOBODY, f"version 0: {NOBODY}"),  # and of a few devices none is of the arm
        (0.3, [6, 0], NOBODY, f"version 0: {KNOWN}"),
        (0.3, [0, 6], KNOWN, f"version 1: {KNOWN}"),
        (0.0, [6], KNOWN, f"version 0: {KNOWN}"),  # the arm was dissolved since
    ],
)
def test_a_share_that_nobody_is_of_is_told_from_one_that_nobody_asked_for(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    control: float,
    arms: Sequence[int],
    newest: str,
    listed: str,
) -> None:
    home, live = home_with(tmp_path, control, arms)
    assert newest in live and (newest or "federation" not in live)
    assert command(home, "status") == 0
    status = capsys.readouterr().out
    assert f"control arm  {newest}" in status if newest else "control arm" not in status
    picture = tmp_path / "out" / "figures.svg"
    assert command(home, "evaluations", "--picture", str(picture)) == 0
    assert listed in capsys.readouterr().out
    svg = picture.read_text()
    drawn = " ".join(re.findall(r"<!-- (.*?) -->", svg, re.DOTALL))
    assert listed in " ".join(drawn.split())
    # No version lies between two.
    ticks = re.findall(r'id="xtick_\d+">.*?<!-- (.*?) -->', svg, re.DOTALL)
    assert ticks and all(re.fullmatch(r"[\u22120-9]+", each) for each in ticks)
    assert command(home, "evaluations", "--json") == 0
    brings = json.loads(capsys.readouterr().out)["versions"][0]["brings"]
    assert brings.startswith(newest) if newest else brings is None
    with Fleet.open(home.folder) as fleet:
        view = LEARNING.read(fleet, PageQuery(()))
    assert view.brings.startswith(newest) and bool(view.brings) == bool(newest)
    assert view.note.startswith(UNASKED) if listed == UNASKED else not view.note


def test_a_cost_is_told_as_what_it_costs() -> None:
    """Whoever reads that it costs less than nothing thinks of a gain."""
    reports = [
        EvaluationReport(
            tuple(
                Evaluation(stage, "accuracy", np.array([100.0, right + place % 2]))
                for stage, right in zip(STAGES, (40.0, 50.0, 60.0), strict=True)
            )
        )
        for place in range(DEVICES)
    ]
    figures = summarise((DeviceReport("", each) for each in reports), Rules(("accuracy",), 3))
    assert "federation costs 10.0 points (10.0 to 10.0): accuracy" in what_it_brings(figures)
