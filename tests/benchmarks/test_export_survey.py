"""The survey end to end on one tiny model that needs no package but torch, and its tables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import export
from benchmarks.export_survey import survey
from benchmarks.export_survey.__main__ import BEGIN, END, main, page, report
from benchmarks.export_survey.compare import compared
from benchmarks.export_survey.steps import subjects
from benchmarks.export_survey.subject import OPTIMIZERS, Kind, Subject, TrainStep
from benchmarks.export_survey.survey import Exporting, Outcome, Run, Training
from benchmarks.harness import StoredRuns

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_one_model_beside_torch_and_an_older_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tmp_path / "older"
    for package in ("export", "device_sdk"):
        shutil.copytree(ROOT / package, older / package)
    verify = older / "export" / "verify.py"
    text = verify.read_text().replace(", rounded_anew", ", rounded_anew as _later")
    verify.write_text(text.replace("with rounded_anew(", "with _later("))
    asked = ["--only", "triplet margin", "--against", str(older), "--seconds", "0.01"]
    stored = ["--results", str(tmp_path)]
    assert main([*asked, *stored]) == 0
    run = Run("triplet margin", "set-ups", timed=True, compared=True)
    outcome = StoredRuns(tmp_path, "export_survey", Outcome).load(run)
    assert outcome is not None
    assert {name: one.verdict for name, one in outcome.exporting.items()} == {
        "ours": "right",
        "before": "right",
    }
    assert set(outcome.training) == {"ours", "before", "torch"}
    for training in outcome.training.values():
        assert len(training.turns) == survey.TURNS and min(training.turns) > 0
        assert training.opening_seconds > 0
    # An artifact trains without torch, whose libraries alone take more than this.
    assert outcome.training["ours"].peak_mib < 0.6 * outcome.training["torch"].peak_mib
    assert "| right" in capsys.readouterr().out

    monkeypatch.setattr("benchmarks.export_survey.__main__.measure", None)
    assert main([*asked, *stored]) == 0, "what is stored is not measured again"


def test_a_sparse_buffer_is_no_state_to_compare(tmp_path: Path) -> None:
    subject = next(each for each in subjects() if each.name == "pygcn, sparse adjacency")
    step = subject.step()
    export.train_step(
        step.model,
        step.loss,
        step.batch,
        optimizer=OPTIMIZERS[step.optimizer].ours(step.model),
        dynamic=step.axes,
        directory=tmp_path / "artifact",
        verify=False,
    )
    assert compared(subject, tmp_path / "artifact").excess <= 1


def test_names_are_single_and_a_missing_package_is_said() -> None:
    names = [subject.name for subject in subjects()]
    assert len(names) == len(set(names)) >= 100
    away = Subject("Away", "vision", "no_such_package", _never)
    assert away.missing
    assert "Away: left out, no_such_package is not installed" in report([away], {"Away": None})


def test_the_page_takes_the_summary_and_a_page_a_kind_its_models(tmp_path: Path) -> None:
    kind = Kind("text")
    for name in ("One", "Two", "Three"):
        kind.add(name)(_never)
    turns = {"ours": Training(0.5, 90.0, [1.0, 2.0]), "torch": Training(1.0, 300.0, [2.0, 3.0])}
    found: dict[str, Outcome | None] = {
        "One": Outcome("", {"ours": Exporting("right", "", 2.0, 7)}, turns),
        "Two": Outcome("", {"ours": Exporting("refused", "why\nno lowering", 0.0, 0)}),
        "Three": None,
    }
    file = tmp_path / "page.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    page(file, kind.subjects, found)
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| [text](page/text.md) | 1/2" in text and "Two: refused: no lowering" in text
    assert "1 of 3 models were not run yet." in text and "One" not in text
    models = (tmp_path / "page" / "text.md").read_text()
    assert "| One " in models and "1.50, 1.75" in models and "Three" not in models
    file.write_text("no markers")
    with pytest.raises(ValueError, match="no lines"):
        page(file, kind.subjects, found)


def _never() -> TrainStep:
    raise AssertionError("not to be made")
