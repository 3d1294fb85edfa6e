"""Versions of a fleet that serves: listed, taken out, pinned, and gone back to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from aggregator.demo.fleet import FleetMember, FleetTask, local_fleet
from aggregator.home import AggregatorHome
from device_sdk import Device
from device_sdk.artifact import safetensors
from device_sdk.wire.publish.receipts import Verdict
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.array_device import local_data
from tests.fakes.client import ScriptedDevice
from tests.fakes.handmade import FEATURES, linear_artifact
from tests.fakes.homes import ITEMS, WIDTH, ServeProcess, command, invite, make_home, serving
from tests.fakes.outputs import error_of, output_of
from tests.fakes.tasks import task_text
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS, wait_until
from tests.faults.crash_points import ROLLBACK_POINTS

ALONE = "quorum = 1"
BRIEF = "quorum = 1\ndeadline_seconds = 1.0"
KEEPING = "[models]\nkeep_last = 2\n"


def items_of(home: AggregatorHome, version: int) -> np.ndarray:
    store = home.open_store()
    try:
        return store.first.versions.model(version)["items"]
    finally:
        store.database.close()


def test_versions_are_listed_pinned_taken_out_and_gone_back_to(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, ALONE, KEEPING)
    out = tmp_path / "model.safetensors"
    with serving(home), ScriptedDevice(mosquitto.url, invite(home)[0]) as anna:
        anna.enrol().join()
        assert anna.take_part(1).verdict is Verdict.COUNTED
        anna.await_round(2)
        assert command(home, "models", "--pin", "1") == 0
        one = items_of(home, 1)
        for number in (2, 3, 4):
            assert anna.take_part(number).verdict is Verdict.COUNTED
        anna.await_round(5)
        listed = json.loads(output_of(capsys, home, "models", "--json"))
        assert [(row["version"], row["pinned"]) for row in listed] == [
            (4, False),
            (3, False),
            (1, True),
        ]
        assert listed[0]["devices"] == 1 and listed[0]["round"] == 4
        assert command(home, "model", "--version", "1", "--out", str(out)) == 0
        found = safetensors.decode(out.read_bytes())
        np.testing.assert_array_equal(found.tensors["items"], one)
        assert json.loads(found.metadata["items"]) == [f"item-{row}" for row in range(ITEMS)]
        assert (found.metadata["version"], found.metadata["round"]) == ("1", "1")

        # A version that is gone names those that are there, in every command.
        capsys.readouterr()
        for arguments in (
            ("rollback", "--to", "2"),
            ("model", "--version", "2", "--out", str(out)),
            ("models", "--pin", "2"),
        ):
            assert "kept are 1, 3, 4" in error_of(capsys, home, *arguments)
        assert "no task 'other'; it has default" in error_of(
            capsys, home, "model", "--task", "other", "--out", str(out)
        )
        assert command(home, "rollback", "--cancel") == 1

        # Round 5 is open: its update makes version 5, and then version 6 is version 1's model.
        assert command(home, "rollback", "--to", "1") == 0
        assert anna.take_part(5).verdict is Verdict.COUNTED
        sixth = anna.await_round(6)
        assert sixth.version == 6
        tensors = anna.fetch(sixth)[1].tensors
        items = tensors["items"].astype(np.float32) * tensors["strengths"]
        np.testing.assert_allclose(items, one, atol=1e-3)
        np.testing.assert_array_equal(items_of(home, 6), one)
        assert command(home, "models", "--unpin", "1") == 0
        # Devices notice nothing: the next update is of the version that they were given.
        assert anna.take_part(6).verdict is Verdict.COUNTED
        assert anna.await_round(7).version == 7
        table = output_of(capsys, home, "models", "--all")
    assert "version 1" in table and table.count("no model kept") == 6


def test_each_task_has_versions_of_its_own_and_may_begin_with_anothers(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, ALONE)
    (home.folder / "air.tsv").write_text("item-5\nnew\nitem-0\n")
    file, strange, wider = (tmp_path / f"{name}.toml" for name in ("air", "strange", "wider"))
    text = task_text(home, "other", BRIEF, 'warm_start = "task:default@1"')
    # Of least squares a model of any width fits.
    text = text.replace("[scatter]", '[scatter]\nloss = "bpr"')
    file.write_text(text.replace("other.tsv", "air.tsv"))
    strange.write_text(text)
    wider.write_text(text.replace("other.tsv", "air.tsv").replace("columns = 8", "columns = 9"))
    with serving(home), ScriptedDevice(mosquitto.url, invite(home)[0]) as anna:
        anna.enrol().join()
        assert anna.take_part(1).verdict is Verdict.COUNTED
        anna.await_round(2)
        one = items_of(home, 1)
        assert command(home, "task", "add", "air", "--from", str(file)) == 0
        out = tmp_path / "air.safetensors"
        assert command(home, "model", "--task", "air", "--out", str(out)) == 0
        found = safetensors.decode(out.read_bytes())
        assert (found.metadata["task"], found.metadata["version"]) == ("air", "0")
        assert json.loads(found.metadata["items"]) == ["item-5", "new", "item-0"]
        np.testing.assert_array_equal(found.tensors["items"][[0, 2]], one[[5, 0]])
        assert found.tensors["items"][1].all()  # of an item that is new: as it was drawn
        assert "name one by --task, of default, air" in error_of(capsys, home, "models")
        # What does not fit is said, and the task is served once its file is mended.
        assert "none of its items is in the task's catalogue" in error_of(
            capsys, home, "task", "add", "strange", "--from", str(strange)
        )
        # To a version of before a replacement that does not fit what came its file comes back.
        assert command(home, "task", "replace", "air", "--from", str(wider), "--now") == 0
        store = home.open_store()
        versions = store.task(2).versions
        # Noted as the task's parts are made anew, just after the replacement's commit.
        wait_until(lambda: versions.find(1) is not None)
        rows = json.loads(output_of(capsys, home, "models", "--task", "air", "--json"))
        assert [row["version"] for row in rows] == [1, 0]
        assert "the task file of that time is used" in output_of(
            capsys, home, "rollback", "--task", "air", "--to", "0"
        )
        assert command(home, "rollback", "--task", "air", "--cancel") == 0
        versions.ask_for(0)  # what a command of before this was known left behind
        wait_until(lambda: versions.awaited() is None)
        assert "version 0's model did not become" in (store.task(2).facts.dropped_rollback or "")
        assert [row.version for row in versions.all()] == [1, 0]
        # A task that is retired takes its versions with it.
        assert command(home, "task", "retire", "air") == 0
        assert versions.all() == [] and len(store.first.versions.all()) == 2
        store.database.close()


def test_kill_nine_around_a_rollback_leaves_the_version_before_or_after(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, ALONE + "\nmost_rounds = 1", KEEPING)
    process, connections = ServeProcess(home), 0
    try:
        with ScriptedDevice(mosquitto.url, invite(home)[0]) as anna:
            process.start()
            connections += 1
            process.await_connections(connections)
            anna.enrol().join()
            assert anna.take_part(1).verdict is Verdict.COUNTED
            anna.await_round(2)  # which rests: nobody is selected any more
            process.kill()
            wanted = {0: items_of(home, 0), 1: items_of(home, 1)}
            for version, point in enumerate(ROLLBACK_POINTS, start=1):
                target = 1 - version % 2
                assert command(home, "models", "--pin", str(target)) == 0
                assert command(home, "rollback", "--to", str(target)) == 0
                process.start(point, 1)
                assert process.wait() == -9
                done = point == "after a rollback"
                store = home.open_store()
                checkpoint = store.first.checkpoints.get("version")
                newest = store.first.versions.all()[0]
                assert checkpoint is not None
                assert checkpoint.version == newest.version == version + done
                assert store.first.versions.awaited() == (None if done else target)
                store.database.close()
                process.start()
                connections += 1
                _await_version(home, version + 1)
                np.testing.assert_array_equal(items_of(home, version + 1), wanted[target])
                _await_shown(anna, version + 1)
                process.kill()
    finally:
        process.kill()


def _await_version(home: AggregatorHome, version: int) -> None:
    store = home.open_store()
    try:
        wait_until(lambda: store.first.versions.all()[0].version == version)
    finally:
        store.database.close()


def _await_shown(device: ScriptedDevice, version: int) -> None:
    def shown() -> bool:
        device.pump(0.05)
        return device.manifest is not None and device.manifest.version == version

    wait_until(shown)


# A file that needs nothing of ours: run by a process that can import nothing of ours.

_ALONE = """
import json, sys
import numpy as np
import onnxruntime as ort
assert not any(name.split(".")[0] in ("device_sdk", "aggregator") for name in sys.modules)
try:
    import device_sdk
except ImportError:
    pass
else:
    raise SystemExit("device_sdk can be imported")
model, samples, out = sys.argv[1:]
session = ort.InferenceSession(model)
(given,) = session.get_inputs()
answers = session.run(None, {given.name: np.load(samples)})
notes = session.get_modelmeta().custom_metadata_map
np.savez(out, **dict(zip([each.name for each in session.get_outputs()], answers)))
print(json.dumps(notes))
"""


def alone(
    folder: Path, model: Path, samples: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """What a process with onnxruntime and numpy alone makes of a file: outputs and metadata."""
    np.save(folder / "samples.npy", samples)
    (folder / "alone.py").write_text(_ALONE)
    packages = folder / "packages"
    packages.mkdir(exist_ok=True)
    for module in (np, sys.modules["onnxruntime"]):
        place = Path(str(module.__file__)).parent
        for each in (place, place.with_name(f"{place.name}.libs")):
            link = packages / each.name
            if each.exists() and not link.exists():
                link.symlink_to(each)
    done = subprocess.run(
        # -S: no site-packages, where a checkout's own packages are on the path.
        [sys.executable, "-S", str(folder / "alone.py"), str(model), "samples.npy", "out.npz"],
        cwd=folder,
        env={"PYTHONPATH": str(packages), "ORT_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    with np.load(folder / "out.npz") as found:
        return dict(found), json.loads(done.stdout)


def test_the_best_version_runs_alone_and_says_what_a_device_says(tmp_path: Path) -> None:
    linear_artifact(tmp_path / "linear", "rmse")
    task = FleetTask(
        "fedavg",
        [tmp_path / "linear"],
        deadline_seconds=NEVER_SECONDS,
        rounds=3,
        settings={"training": {"learning_rate": 0.05}},
        broadcast_codec="float32",
    )
    members = [FleetMember(f"device-{n}", local_data(n)) for n in range(2)]
    samples = np.random.default_rng(8).standard_normal((7, FEATURES)).astype(np.float32)
    with local_fleet(task, members, tmp_path / "fleet") as fleet:
        rows = list(fleet.rounds())
        assert len(rows) == 3
        home = AggregatorHome(tmp_path / "fleet" / "aggregator")
        with home.task_file.open("a") as file:
            file.write("\n[evaluation]\n")
        store = home.open_store()
        for version, loss in ((1, 0.5), (2, 0.7), (3, 0.1)):
            store.first.versions.note_metrics(version, {"rmse": loss})
        store.database.close()
        out = tmp_path / "best.onnx"
        assert command(home, "model", "--version", "best", "--out", str(out)) == 0
        device = fleet.devices["device-0"]
        _await_read([device])
        predicted = device.predict({"x": samples})
        own = device.model()
    outputs, notes = alone(tmp_path, out, samples)
    assert outputs.keys() == predicted.keys()
    for name, array in predicted.items():
        np.testing.assert_allclose(outputs[name], array, rtol=1e-5, atol=1e-6)
    assert (notes["task"], notes["version"], notes["round"]) == ("default", "3", "3")
    assert notes["producer"].startswith("tessera")
    # What the device gives its own app is the same model, by the same names.
    assert own.version == 3 and own.task == "default"
    plain = tmp_path / "best.safetensors"
    assert command(home, "model", "--version", "3", "--out", str(plain)) == 0
    taken = safetensors.decode(plain.read_bytes())
    for name, array in taken.tensors.items():
        np.testing.assert_array_equal(own.arrays[name], array)
    assert safetensors.decode(own.to_safetensors()).metadata["version"] == "3"


def test_personal_layers_are_in_a_devices_own_model_and_nowhere_else(tmp_path: Path) -> None:
    linear_artifact(tmp_path / "linear")
    task = FleetTask(
        "fedavg",
        [tmp_path / "linear"],
        deadline_seconds=NEVER_SECONDS,
        rounds=1,
        settings={"training": {"learning_rate": 0.05, "personal": "linear.bias"}},
        broadcast_codec="float32",
    )
    members = [FleetMember(f"device-{n}", local_data(n)) for n in range(2)]
    with local_fleet(task, members, tmp_path / "fleet") as fleet:
        list(fleet.rounds())
        devices = list(fleet.devices.values())
        _await_read(devices)
        models = [device.model().arrays for device in devices]
    store = AggregatorHome(tmp_path / "fleet" / "aggregator").open_store()
    kept = store.first.versions.model(1)
    store.database.close()
    assert "linear.bias" not in kept
    assert not np.array_equal(models[0]["linear.bias"], models[1]["linear.bias"])
    for arrays in models:
        np.testing.assert_array_equal(arrays["linear.weight"], kept["linear.weight"])


def _await_read(devices: Sequence[Device]) -> None:
    """The task's rounds are over: devices take over the last version as it is."""
    wait_until(
        lambda: all(device.status().outcome == "read" for device in devices),
        lambda: [device.status() for device in devices],
    )


def test_item_vectors_leave_as_graphs_that_recommend(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, ALONE)
    with serving(home):
        wait_until(lambda: items_of(home, 0).shape == (ITEMS, WIDTH))
    printed = output_of(capsys, home, "model", "--out", str(tmp_path / "clicks.onnx"))
    assert "clicks.onnx: version 0" in printed and "clicks.fold-in.onnx: version 0" in printed
    for place in (".", "/"):
        assert "it is a folder, name a file" in error_of(
            capsys, home, "model", "--format", "onnx", "--out", place
        )
    vectors = items_of(home, 0)
    found, notes = alone(tmp_path, tmp_path / "clicks.fold-in.onnx", np.array([1, 5]))
    assert found["user"].shape == (1, WIDTH)
    assert json.loads(notes["items"])[5] == "item-5"
    import onnxruntime as ort

    session = ort.InferenceSession(tmp_path / "clicks.onnx")
    scores, best, _ = session.run(
        None,
        {"user": found["user"], "seen": np.array([[0, 1], [0, 5]]), "count": np.array([3])},
    )
    np.testing.assert_allclose(scores[0], vectors @ found["user"][0], rtol=1e-4, atol=1e-7)
    assert not set(best[0].tolist()) & {1, 5}
