"""A device for whose machine there is no wheel of onnxruntime (Alpine, 32-bit ARM)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.brokers.mosquitto import Mosquitto
from tests.device_sdk.test_device_with_aggregator import Operator
from tests.fakes.quick import run_python

_ROOT = Path(__file__).parents[2]
# Nothing but numpy, cryptography and paho-mqtt.
_BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("onnxruntime", "tabulate", "torch", "onnx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""
_DEVICE = (
    _BLOCKED
    + """
import json, sys, time
from pathlib import Path
from device_sdk import Device, LocalData, TrainingOptions
from device_sdk.home.home import Home
from tests.brokers.links import QUICK
from tests.fakes.brisk import BRISK

url, code, home, wanted = sys.argv[1:]
device = Device.enrol(
    url, code, home, options=TrainingOptions(capability_seconds=0.5), pace=BRISK,
    link_settings=QUICK, timeout_seconds=100, data=LocalData({}),
)
device.record_all([(f"film-{n}", "anna") for n in range(8)])
device.start()
until = time.monotonic() + 100
while time.monotonic() < until:
    status = device.status()
    if status.verdict == wanted or (wanted == "problem" and status.outcome == "failed"):
        break
    time.sleep(0.02)
told = {"verdict": status.verdict, "k": status.k, "why": status.k_reason, "detail": status.detail}
told["problem"], told["best"] = status.problem, []
if wanted == "counted":
    told["best"] = [item for item, _ in device.recommend(5, user="anna")]
device.close()
assert "onnxruntime" not in sys.modules
print(json.dumps(told))
"""
)
_FEDAVG = """
[task]
method = "fedavg"
artifacts = ["shipped:mf"]
[broker]
url = "{url}"
[round]
deadline_seconds = {never}
wait_for_devices = {wait}
quorum = 1
most_rounds = {rounds}
"""


def run(script: str, *arguments: str) -> str:
    done = run_python("-c", script, *arguments, env={**os.environ, "PYTHONPATH": str(_ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_takes_part_in_scatter_and_recommends(mosquitto: Mosquitto, tmp_path: Path) -> None:
    operator = Operator(tmp_path, mosquitto.url, rounds=3, wait=1)
    (code,) = operator.codes(1)
    with operator.serving():
        home = str(tmp_path / "home")
        told = json.loads(run(_DEVICE, mosquitto.url, code, home, "counted"))
    assert told["verdict"] == "counted" and told["problem"] == ""
    assert told["k"] == 16 and "k = 16 takes" in told["why"]
    assert len(told["best"]) == 5
    assert not {f"film-{n}" for n in range(8)} & set(told["best"])


def test_a_task_that_trains_an_artifact_says_what_is_missing(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    operator = Operator(tmp_path, mosquitto.url, rounds=3, wait=1, task=_FEDAVG)
    (code,) = operator.codes(1)
    with operator.serving():
        home = str(tmp_path / "home")
        told = json.loads(run(_DEVICE, mosquitto.url, code, home, "problem"))
    for text in (told["detail"], told["problem"]):
        assert "takes onnxruntime" in text and "pip install onnxruntime" in text, told


def test_a_device_that_has_onnxruntime_does_not_load_it_with_the_sdk() -> None:
    loads = "import sys, device_sdk.device, device_sdk.train.scatter; print(sorted(sys.modules))"
    assert "device_sdk.device" in run(loads) and "onnxruntime" not in run(loads)


@pytest.mark.parametrize("name", ["Trainer", "factorisation.LocalFactorisation"])
def test_what_runs_an_artifact_says_what_is_missing(name: str) -> None:
    script = f"""{_BLOCKED}
import device_sdk, device_sdk.factorisation, numpy as np
from device_sdk.factorisation import LocalSettings, packaged_artifact
try:
    if {name!r} == "Trainer":
        device_sdk.Trainer(packaged_artifact())
    device_sdk.{name}(packaged_artifact(), None, LocalSettings(4), rng=np.random.default_rng())
except device_sdk.RuntimeMissing as error:
    print(error)
"""
    assert "takes onnxruntime" in run(script)
