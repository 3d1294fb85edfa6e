"""Real time ends a test that hangs, and decides nothing that a test asserts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS

TESTS = Path(__file__).parent
HELD = """
aggregator/cluster/test_same_bits.py
aggregator/rounds aggregator/simulate aggregator/task aggregator/serve/test_service_promises.py
aggregator/serve/test_task_log.py attacks/nemeses.py attacks/restarts.py attacks/test_absences.py
attacks/test_accidents.py attacks/test_any_value.py attacks/test_broadcasts.py
attacks/test_clocks.py attacks/test_living.py
attacks/test_lost_sessions.py
attacks/test_payloads.py attacks/test_sleepers.py attacks/test_remains.py device_sdk/capability
device_sdk/rounds/test_attachments.py device_sdk/rounds/test_cell.py
device_sdk/rounds/test_participant.py device_sdk/rounds/test_reports.py
device_sdk/rounds/test_resubscription.py device_sdk/rounds/test_successor.py
device_sdk/rounds/test_several_tasks.py faults/test_method_faults.py
faults/test_simulated_network.py faults/test_task_changes.py
"""
"""Where rounds go by a clock that the test holds, or no device takes part in any."""
ENDING = {
    "aggregator/serve/test_standings.py": "sends again where a round was over",
    "aggregator/serve/test_versions_served.py": "no device takes part in the task",
    "device_sdk/rounds/test_array_rounds.py": "waits for the first round that counts an update",
    "device_sdk/rounds/test_two_tasks_served.py": "waits for the first that counts an update",
    "faults/__main__.py": "whatever becomes of an update, the oracle judges",
    "faults/chaos.py": "likewise, and no device misses eight rounds in a row",
    "faults/test_chaos_runs.py": "likewise",
    "faults/test_cluster_chaos_runs.py": "likewise",
}
"""Where rounds have to end by real deadlines, and why it is the same which of them do."""

_PATIENCE = re.compile(r"(?i)(?:patience_seconds(?:: float)?|\btimeout)\s*=\s*(\d[\d_.]*)")
_DEADLINE = re.compile(r"""(?<!least_)deadline_seconds["']?(?:: float)?\s*[=:]\s*([\d_.]+)""")


def short_deadlines(source: str) -> list[float]:
    """The deadlines in seconds that a source names as numbers, and that a busy machine reaches."""
    found = [float(number.rstrip(".")) for number in _DEADLINE.findall(source)]
    return [each for each in found if each < NEVER_SECONDS]


def hasty_enrolments(source: str) -> list[int]:
    """The lines that enrol a device for as long as the product does, or for less."""

    def is_hasty(call: ast.Call) -> bool:
        given = [each.value for each in call.keywords if each.arg == "timeout_seconds"]
        return not given or isinstance(given[0], ast.Constant)

    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "Device.enrol"
        and is_hasty(node)
    ]


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        if path != Path(__file__):
            yield name, path.read_text()


def is_held(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}/") for each in HELD.split())


def test_no_round_of_a_test_ends_because_the_machine_is_busy() -> None:
    short = {name for name, source in sources() if short_deadlines(source)}
    assert sorted(each for each in short if not is_held(each)) == sorted(ENDING), (
        "let the rounds last (tests.fakes.waiting.endless), or go by a clock that the test holds"
    )
    assert [each for each in HELD.split() if not any(is_held(name) for name in short)] == []


def test_no_device_of_a_test_gives_up_enrolling_because_the_machine_is_busy() -> None:
    found = {name: lines for name, source in sources() if (lines := hasty_enrolments(source))}
    assert found == {}, "give them timeout_seconds=PATIENCE_SECONDS"


def test_no_wait_of_a_test_ends_because_the_machine_is_busy() -> None:
    waits = {
        name: found
        for name, source in sources()
        if (found := [each for each in _PATIENCE.findall(source) if float(each) < PATIENCE_SECONDS])
    }
    assert waits == {}, "wait for PATIENCE_SECONDS"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('ROUND = "quorum = 1\\ndeadline_seconds = 60.0"', [60.0]),
        ("open_round(deadline_seconds=3, train_seconds=1.5)", [3.0]),
        ('{"deadline_seconds": 1_000.0}', [1000.0]),
        ("def open_round(self, deadline_seconds: float = 60) -> None: ...", [60.0]),
        ("deadline_seconds = {NEVER_SECONDS}", []),
        ("deadline_seconds = 86_400", []),
        ("least_deadline_seconds = 5", []),
    ],
)
def test_the_check_sees_every_way_to_write_a_deadline(source: str, found: list[float]) -> None:
    assert short_deadlines(source) == found


def test_the_check_sees_a_hasty_enrolment() -> None:
    source = "Device.enrol(url, code)\nDevice.enrol(url, code, timeout_seconds=15)\n"
    assert hasty_enrolments(source) == [1, 2]
    assert hasty_enrolments("Device.enrol(url, code, timeout_seconds=PATIENCE_SECONDS)") == []
