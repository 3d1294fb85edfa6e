"""The tutorial's programs run as printed, one after the other, in an empty folder."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aggregator.demo.broker import mosquitto_path
from tests.fakes.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")

_FILE = r"<!-- file: (?P<file>\S+) -->\n```python\n(?P<source>.*?)```"
_RUN = r"<!-- run -->\n```sh\n(?P<command>.*?)\n```\n\nprints\n\n```text\n(?P<output>.*?)\n```"
_STEPS = list(re.finditer(f"{_FILE}|{_RUN}", TUTORIAL, re.DOTALL))


def run(command: str, folder: Path) -> list[str]:
    """The lines that it prints, as from a shell in a clone with its environment activated."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment = {**os.environ, "PATH": os.pathsep.join(places), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()


def shape(line: str) -> str:
    """A line without its figures, which a processor may change."""
    return re.sub(r"\d+(\.\d+)?", "N", line)


@pytest.mark.slow
@pytest.mark.skipif(
    mosquitto_path() is None and importlib.util.find_spec("amqtt") is None,
    reason="needs a broker: Mosquitto, or amqtt",
)
def test_each_program_prints_what_the_page_says(tmp_path: Path) -> None:
    assert len(_STEPS) > 8
    printed: list[str] = []
    for step in _STEPS:
        if step["file"]:
            target = tmp_path / step["file"]
            target.parent.mkdir(exist_ok=True)
            target.write_text(step["source"], encoding="utf-8")
            continue
        found = run(step["command"], tmp_path)
        said = step["output"].splitlines()
        if "..." in said:  # more of the same lines stand there
            cut = said.index("...")
            found = [*found[:cut], "...", *found[len(found) - (len(said) - cut - 1) :]]
        assert [shape(line) for line in found] == [shape(line) for line in said]
        printed += found
    alone, together = (
        int(match[1])
        for line in printed
        if (match := re.search(r"name[s]? (\d+)% of the test images", line))
    )
    assert alone <= 60 < 80 <= together
    assert "torch says the same: True" in printed
    assert printed[-1].endswith(f": {together}% right")


def test_no_block_is_left_out() -> None:
    # The set-up is the reader's: it makes the environment that this test runs in.
    blocks = re.findall(r"^```(?:python|sh)$", TUTORIAL, re.MULTILINE)
    assert len(blocks) == len(_STEPS) + 1
