"""A fleet from Python: what commands show and do, typed, beside a serve and without one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from aggregator import Fleet
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from device_sdk.artifact import safetensors
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.homes import make_home, serving
from tests.fakes.outputs import error_of, output_of
from tests.fakes.quick import joined
from tests.fakes.tasks import task_text
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

PAGE = Path(__file__).parents[3] / "docs/operating/python.md"


@pytest.fixture
def home(tmp_path: Path) -> AggregatorHome:
    made = make_home(tmp_path, "mqtt://127.0.0.1:1", "quorum = 1")
    with serving(made):
        pass
    return made


def test_importing_the_package_stays_light() -> None:
    code = "import sys, aggregator; print('numpy' in sys.modules, aggregator.Fleet.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.stdout == "False Fleet\n", done.stderr
    with pytest.raises(ImportError):
        from aggregator import Flotilla  # type: ignore[attr-defined]  # noqa: F401


def test_a_folder_without_a_home_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(AggregatorError, match="tessera-aggregator init --home"):
        Fleet.open(tmp_path)


def test_what_it_reads_is_what_the_commands_print(
    home: AggregatorHome, capsys: pytest.CaptureFixture[str]
) -> None:
    with Fleet.open(home.folder, actor="anna") as fleet:
        assert [asdict(each) for each in fleet.tasks()] == json.loads(
            output_of(capsys, home, "task", "list", "--json")
        )
        listed = json.loads(output_of(capsys, home, "models", "--json"))
        assert [each.version for each in fleet.versions().versions] == [
            each["version"] for each in listed
        ]
        assert fleet.file_of("default") == output_of(capsys, home, "task", "show", "default")
        assert fleet.evaluations().note + "\n" == output_of(capsys, home, "evaluations")
        assert fleet.rounds(count=3) == [] and fleet.refusals() == {} and fleet.devices() == []


def test_its_errors_are_the_commands_words(
    home: AggregatorHome, capsys: pytest.CaptureFixture[str]
) -> None:
    with Fleet.open(home.folder, actor="anna") as fleet:
        for doing, command in (
            (lambda: fleet.revoke("3f"), ("revoke", "3f")),
            (lambda: fleet.pin(9), ("models", "--pin", "9")),
            (lambda: fleet.unpin(0), ("models", "--unpin", "0")),
            (lambda: fleet.release(), ("release",)),
            (lambda: fleet.pause("air"), ("task", "pause", "air")),
            (lambda: fleet.retire_task("default"), ("task", "retire", "default")),
            (lambda: fleet.cancel_rollback(), ("rollback", "--cancel")),
            (lambda: fleet.versions("air"), ("models", "--task", "air")),
        ):
            with pytest.raises(AggregatorError) as caught:
                doing()
            assert str(caught.value) in error_of(capsys, home, *command)
        for name in ("", "a\nb", "x" * 65):
            with pytest.raises(AggregatorError, match="is no name"):
                fleet.invite(name=name)
        with pytest.raises(AggregatorError):
            fleet.invite(labels={"not a label": "x"})
        for count, seconds in ((0, 60), (1, 0), (-1, 60)):
            with pytest.raises(AggregatorError, match="expected 1 to"):
                fleet.invite(count, seconds)
        assert fleet.unused_codes() == []


def test_tasks_are_added_paused_replaced_and_retired_by_their_texts(home: AggregatorHome) -> None:
    with Fleet.open(home.folder, actor="anna") as fleet:
        added = fleet.add_task("air", text=task_text(home, "air"))
        assert added.said == "task air is served" and not fleet.wait(added).is_done
        assert [each.state for each in fleet.tasks()] == ["active", "not served yet"]
    with serving(home), Fleet.open(home.folder, actor="anna") as fleet:
        assert fleet.wait(added, PATIENCE_SECONDS).is_done
        assert not fleet.pause("air").before
        assert fleet.pause("air").before
        assert fleet.tasks()[1].state == "paused"
        assert not fleet.resume("air").before
        assert fleet.resume("air").before
        change = fleet.replace_task("air", text=task_text(home, "air", width=4), now=True)
        assert change.notes and fleet.wait(change, PATIENCE_SECONDS).is_done
        assert "columns = 4" in fleet.file_of("air")
        assert fleet.wait(fleet.retire_task("air"), PATIENCE_SECONDS).is_done
        assert [each.name for each in fleet.tasks()] == ["default"]
    with Fleet.open(home.folder) as fleet:
        assert [(each.action, each.actor) for each in fleet.audit(9)] == [
            (action, "anna")
            for action in (
                *("add task", "pause", "pause", "resume", "resume"),
                *("replace task", "retire task"),
            )
        ]


def test_models_leave_as_bytes_are_pinned_and_gone_back_to(home: AggregatorHome) -> None:
    with Fleet.open(home.folder, actor="anna") as fleet:
        model = fleet.model()
        (data,) = model.files.values()
        assert safetensors.decode(data).tensors["items"].shape == (20, 8)
        fleet.pin(model.version)
        assert fleet.versions().versions[0].pinned
        fleet.unpin(model.version)
        assert not fleet.versions().versions[0].pinned
        assert fleet.rollback(0).later is not None
        assert fleet.versions().rollback.version == 0
        assert fleet.cancel_rollback().version == 0
        assert fleet.versions().rollback.version is None


def test_a_fleet_moves_and_is_put_back_and_that_is_noted(home: AggregatorHome) -> None:
    now = int(time.time())
    with Fleet.open(home.folder, actor="anna", clock=lambda: now + 60.0) as fleet:
        (here,) = fleet.broker().ways
        with pytest.raises(AggregatorError, match=r"serve is at .* already"):
            fleet.move_broker(str(here.url))
        with pytest.raises(AggregatorError, match="no move is under way"):
            fleet.stay_at_broker()
        fleet.move_broker("mqtt://elsewhere.example:1884", 3600)
        assert len(fleet.broker().ways) == 2 and "moves" in fleet.broker().said[0]
        fleet.stay_at_broker()
        assert "stays" in fleet.broker().said[0]
        with pytest.raises(AggregatorError, match="names no database"):
            fleet.move_store()
        with pytest.raises(AggregatorError, match="already"):
            fleet.move_store(back=True)
        assert fleet.tasks(), "it goes on with the store that it has"
        assert fleet.restored() == now + 60 < fleet.restored(after=now + 3600)
        said = [(each.action, each.outcome == "done") for each in fleet.audit(20)]
    assert said == [
        ("move broker", False),
        ("stay at broker", False),
        ("move broker", True),
        ("stay at broker", True),
        ("move store", False),
        ("move store", False),
        ("restored", True),
        ("restored", True),
    ]


@pytest.mark.parametrize("number", [-1, 2**41, 2**70])
@pytest.mark.parametrize(
    "asked",
    [
        lambda fleet, number: fleet.restored(after=number),
        lambda fleet, number: fleet.rotate_keys(after=number),
        lambda fleet, number: fleet.invite(number),
        lambda fleet, number: fleet.invite(expires_seconds=number),
        lambda fleet, number: fleet.move_broker("mqtt://127.0.0.9", number),
    ],
)
def test_numbers_that_are_none_change_nothing(
    home: AggregatorHome, asked: Callable[[Fleet, int], object], number: int
) -> None:
    with Fleet.open(home.folder, actor="anna") as fleet:
        before = fleet.health().store.facts.generation, fleet.unused_codes(), fleet.broker()
        with pytest.raises(AggregatorError, match=f"is {number}: expected [01] to "):
            asked(fleet, number)
        after = fleet.health().store.facts.generation, fleet.unused_codes(), fleet.broker()
        assert after == before and fleet.audit(1)[0].outcome != "done"


def test_several_threads_and_processes_use_it_at_once(home: AggregatorHome) -> None:
    with Fleet.open(home.folder, actor="anna") as fleet:
        shared = [
            threading.Thread(target=lambda: [fleet.invite() for _ in range(5)]) for _ in range(2)
        ]

        def own() -> None:
            with Fleet.open(home.folder, actor="bert") as mine:
                for _ in range(5):
                    mine.invite()

        threads = [*shared, threading.Thread(target=own)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(120)
        assert len(fleet.unused_codes()) == 15 and len(fleet.audit()) == 15


def test_the_pages_program_looks_after_a_fleet(
    mosquitto: Mosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.search(r"<!-- run: fleet -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    home = make_home(tmp_path, mosquitto.url)
    home.folder.rename(tmp_path / "fleet")
    home = AggregatorHome(tmp_path / "fleet")
    with serving(home), Fleet.open(home.folder, actor="anna") as fleet:
        with joined(mosquitto.url, fleet.invite(name="hall-3")[0], tmp_path / "device") as device:
            device.start()
            wait_until(lambda: fleet.devices()[0].last_seen_unix_seconds)
        done = subprocess.run(
            [sys.executable, "-c", found[1]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        assert "hall-3" in done.stdout and "default" in done.stdout
        assert fleet.device("hall-3").labels == {"site": "north"}
        assert fleet.unused_codes() == []
        assert {each.actor for each in fleet.audit()} == {"anna", "night-shift"}
