"""A fleet over Mosquitto evaluates: the same figures as in one place, whatever dies meanwhile."""

from __future__ import annotations

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import export
from aggregator.demo.fleet import FleetMember, FleetTask, LocalFleet, local_fleet
from aggregator.evaluation import Evaluated
from aggregator.home import AggregatorHome
from aggregator.store.reports import OutcomeCount
from aggregator.store.versions import Ranking
from device_sdk.device import Device
from device_sdk.evaluation.metrics import METRICS, RankMetric
from device_sdk.evaluation.report import Evaluation, EvaluationReport, write_evaluations
from device_sdk.local_data import LocalData
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.receipts import (
    Receipt,
    RecordType,
    Verdict,
    update_digest,
    with_report,
    write_update,
)
from device_sdk.wire.publish.report import Details, Report, ReportedOutcome
from device_sdk.world import TrainingOptions
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.brisk import BRISK
from tests.fakes.client import ScriptedDevice
from tests.fakes.handmade import FEATURES, TARGETS, linear_artifact
from tests.fakes.homes import ITEMS, WIDTH, ServeProcess, command, invite, make_home, serving
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS, wait_until
from tests.faults.crash_points import EVALUATION_POINTS

TWENTY = 20


def held_out_data(place: int) -> LocalData:
    """Samples of device ``place``, some of them held back."""
    rng = np.random.default_rng(place)
    x = rng.standard_normal((30 + place, FEATURES), dtype=np.float32)
    true = np.random.default_rng(99).standard_normal((FEATURES, TARGETS), dtype=np.float32)
    return LocalData({"x": x, "y": x @ true + np.float32(0.1 * place)}, holdout=0.3)


def test_twenty_devices_over_mosquitto_find_what_one_place_finds(tmp_path: Path) -> None:
    linear_artifact(tmp_path / "linear", "mae", "rmse")
    task = FleetTask(
        "fedavg",
        [tmp_path / "linear"],
        deadline_seconds=NEVER_SECONDS,
        rounds=3,
        settings={"training": {"learning_rate": 0.05}},
        broadcast_codec="float32",
        evaluation={},
    )
    members = [FleetMember(f"device-{place}", held_out_data(place)) for place in range(TWENTY)]
    with local_fleet(task, members, tmp_path / "fleet") as fleet:
        assert len(list(fleet.rounds())) == 3
        store = fleet.aggregator.store.first
        found = store.evaluations.latest(10)
        assert [each.version for each in found] == [2, 1, 0]
        tests = [member.data.test for member in members if isinstance(member.data, LocalData)]
        x, y = (np.concatenate([each[name] for each in tests]) for name in ("x", "y"))
        for each in found:
            model = store.versions.model(each.version)
            errors = x @ model["linear.weight"] + model["linear.bias"] - y
            central = {
                "mae": np.abs(errors).mean(),
                "rmse": np.sqrt(np.square(errors, dtype=np.float64).mean()),
            }
            # And what the devices predict with after their training.
            assert [one.stage for one in each.figures] == 2 * ["global"] + 2 * ["personal"]
            for figure in each.figures[:2]:
                assert (figure.devices, figure.samples) == (TWENTY, len(x))
                assert figure.value == pytest.approx(central[figure.metric], rel=1e-5)
        assert found[0].figures[0].value < found[-1].figures[0].value  # it learns


def test_a_control_arm_over_mosquitto_says_what_federation_brings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linear_artifact(tmp_path / "linear", "mae", "rmse")
    task = FleetTask(
        "fedavg",
        [tmp_path / "linear"],
        deadline_seconds=NEVER_SECONDS,
        rounds=3,
        settings={"training": {"learning_rate": 0.05}},
        evaluation={"control": 0.5, "best_by": "mae"},
    )
    members = [FleetMember(f"device-{place}", held_out_data(place)) for place in range(TWENTY)]
    with local_fleet(task, members, tmp_path / "fleet") as fleet:
        assert len(list(fleet.rounds())) == 3
        last, *_ = figures_of(fleet)
        found = {(each.stage, each.metric): each for each in last.figures}
        controls = found["alone", "mae"].devices
        assert 3 <= controls < TWENTY
        assert found["personal", "mae"].control_devices == controls
        # What each kept of its second model is beside its learner's state, and is another model.
        kept = [
            {n for n in fleet.devices[each.name].learner_state() if n.startswith("second model.")}
            for each in members
        ]
        assert sum(map(bool, kept)) == controls
        home = AggregatorHome(tmp_path / "fleet" / "aggregator")
        assert command(home, "evaluations") == 0
        said = capsys.readouterr().out
        mean = found["personal", "mae"].over_alone
        assert f"version {last.version}: federation " in said and f"{abs(mean):.3g} (" in said
        assert command(home, "status") == 0
        assert "control arm  federation " in capsys.readouterr().out
        assert command(home, "evaluations", "--json") == 0
        listed = json.loads(capsys.readouterr().out)["versions"]
        assert listed[0]["brings"].startswith("federation ")
        picture = tmp_path / "out" / "figures.svg"
        assert command(home, "evaluations", "--picture", str(picture)) == 0
        assert "ahead of alone" in picture.read_text()
        assert command(home, "evaluations", "--picture", str(tmp_path / "figures.none")) == 1
        assert "figures.none: Format 'none' is not supported" in capsys.readouterr().err


def test_devices_own_models_are_evaluated_as_one_place_would(tmp_path: Path) -> None:
    """Attention: of the last round, whose models the devices still have."""
    linear_artifact(tmp_path / "linear", "mae", "rmse")
    task = FleetTask(
        "attention",
        [tmp_path / "linear"],
        deadline_seconds=NEVER_SECONDS,
        rounds=3,
        settings={
            "training": {"warm_up_rounds": 1, "learning_rate": 0.05, "aggregator_mixes": True}
        },
        broadcast_codec="float32",
        evaluation={"best_by": "personal.rmse"},
    )
    members = [FleetMember(f"device-{place}", held_out_data(place)) for place in range(4)]
    with local_fleet(task, members, tmp_path / "fleet") as fleet:
        assert len(list(fleet.rounds())) == 3
        fleet.settle(PATIENCE_SECONDS)
        versions, (last, *_) = fleet.aggregator.store.first.versions, figures_of(fleet)
        shared = versions.model(last.version)
        errors: dict[str, list[np.ndarray]] = {"global": [], "personal": []}
        for member in members:
            assert isinstance(member.data, LocalData)
            test, own = member.data.test, fleet.devices[member.name].model()
            assert (own.version, own.round) == (last.version, 3)
            for stage, model in (("global", shared), ("personal", own.arrays)):
                predicted = test["x"] @ model["linear.weight"] + model["linear.bias"]
                errors[stage].append((predicted - test["y"]).astype(np.float64))
        assert len(last.figures) == 4
        for figure in last.figures:
            union = np.concatenate(errors[figure.stage])
            central = {"mae": np.abs(union).mean(), "rmse": np.sqrt(np.square(union).mean())}
            assert (figure.devices, figure.samples) == (4, len(union))
            assert figure.value == pytest.approx(central[figure.metric], rel=1e-5)
        personal, received = (
            next(each.value for each in last.figures if (each.stage, each.metric) == (stage, "mae"))
            for stage in ("personal", "global")
        )
        assert personal < received, "each device's truth is its own"
        best = {row.version: row.metrics["personal.rmse"] for row in versions.kept() if row.metrics}
        assert versions.named("best", Ranking("personal.rmse", False)).version == min(
            best, key=lambda version: best[version]
        )


@pytest.mark.parametrize("choice", ["ditto", "apfl"])
def test_devices_predict_with_models_of_their_own(choice: str, tmp_path: Path) -> None:
    """Federated averaging, each device's truth its own: what ``predict`` and the figures are of is
    the same after the last version, which is nobody's own, and after a restart."""
    linear_model(tmp_path / "linear")
    task = FleetTask(
        "fedavg",
        [tmp_path / "linear"],
        deadline_seconds=NEVER_SECONDS,
        rounds=4,
        settings={"training": {"learning_rate": 0.1, "personalise": choice, "own_share": 0.8}},
        broadcast_codec="float32",
        evaluation={},
    )
    members = [FleetMember(f"device-{place}", held_out_data(place)) for place in range(4)]
    homes: dict[str, tuple[Path, LocalData, np.ndarray]] = {}
    with local_fleet(task, members, tmp_path / "fleet") as fleet:
        assert len(list(fleet.rounds())) == 4
        fleet.settle(PATIENCE_SECONDS)
        last, *_ = figures_of(fleet)
        wait_until(lambda: all(each.status().outcome == "read" for each in fleet.devices.values()))
        errors = []
        for member in members:
            device = fleet.devices[member.name]
            assert isinstance(member.data, LocalData) and device.model().round == 4
            test = member.data.test
            predicted = device.predict({"x": test["x"]})["y"]
            own = device.model().arrays
            np.testing.assert_allclose(
                predicted, test["x"] @ own["weight"].T + own["bias"], atol=1e-5
            )
            errors.append(np.abs(predicted - test["y"]))
            homes[member.name] = device.home, member.data, predicted
        found = {(each.stage, each.metric): each.value for each in last.figures}
        assert found["personal", "mae"] == pytest.approx(np.concatenate(errors).mean(), rel=1e-4)
        assert found["personal", "mae"] < found["global", "mae"], "each device's truth is its own"
        weights = [fleet.devices[each.name].model().arrays["bias"] for each in members]
        assert all((weights[0] != other).any() for other in weights[1:])
    for folder, data, predicted in homes.values():
        with Device.open(folder, pace=BRISK, link_settings=QUICK, data=data) as device:
            np.testing.assert_array_equal(device.predict({"x": data.test["x"]})["y"], predicted)


def linear_model(folder: Path) -> None:
    """Of plain SGD, with its errors declared."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, FEATURES), "y": torch.randn(4, TARGETS)}
    export.train_step(
        torch.nn.Linear(FEATURES, TARGETS),
        lambda model, b: torch.nn.functional.mse_loss(model(b["x"]), b["y"]),
        batch,
        optimizer=export.Sgd(lr=0.1),
        dynamic={name: {0: "batch"} for name in batch},
        predict=lambda model, b: {"y": model(b["x"])},
        metrics={"mae": ("y", "y")},
        directory=folder,
        verify=False,
    )


def figures_of(fleet: LocalFleet) -> list[Evaluated]:
    """What is known of the versions that were evaluated, the newest first."""
    return fleet.aggregator.store.first.evaluations.latest(10)


def test_ranks_after_the_training_are_those_that_one_place_finds(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of BPR: the item matrix that came, with the users' vectors of after the round."""
    count, last = 4, 3
    home = make_home(
        tmp_path,
        mosquitto.url,
        f"quorum = {count}\nmost_rounds = {last}",
        'loss = "bpr"\n[scatter.training]\nuser_learning_rate = 0.5\n'
        '[evaluation]\nmetrics = ["hr10_all", "ndcg10_all"]\n',
    )
    text = home.task_file.read_text()
    home.task_file.write_text(text.replace("[task]", '[task]\nbroadcast_codec = "float32"'))
    devices = []
    with serving(home) as served:
        try:
            for place, code in enumerate(invite(home, count)):
                device = Device.enrol(
                    mosquitto.url,
                    code,
                    tmp_path / f"device-{place}",
                    pace=BRISK,
                    link_settings=QUICK,
                    options=TrainingOptions(k=WIDTH),
                    timeout_seconds=PATIENCE_SECONDS,
                )
                devices.append(device)
                device.record_all([(f"item-{row}", "anna") for row in range(place, ITEMS, 3)])
                device.start()
            wait_until(lambda: len(served.parts.first.store.evaluations.latest(10)) >= last)
            ranks = []
            store = served.parts.first.store
            found = store.evaluations.latest(10)[0]
            items = store.versions.model(found.version)["items"]
            for place, device in enumerate(devices):
                (user,) = device.learner_state()["users"]
                *seen, held = range(place, ITEMS, 3)
                others = np.setdiff1d(np.arange(ITEMS), [*seen, held])
                ranks.append(np.count_nonzero(items[others] @ user >= items[held] @ user))
        finally:
            for device in devices:
                device.close()
    assert found.version == last - 1
    personal = [each for each in found.figures if each.stage == "personal"]
    gains = 1 / np.log2(np.array(ranks) + 2.0)
    hits = np.array(ranks) < 10
    central = {"hr10_all": hits.mean(), "ndcg10_all": np.where(hits, gains, 0).mean()}
    assert {each.metric: each.value for each in personal} == pytest.approx(central)
    assert all((each.devices, each.samples) == (count, count) for each in personal)


def test_kill_nine_between_any_two_steps_changes_no_figure_and_loses_no_report(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    most = len(EVALUATION_POINTS)
    rounds = f"quorum = 3\nwait_for_devices = 3\nmost_rounds = {most}"
    home = make_home(tmp_path, mosquitto.url, rounds, "[evaluation]\n")
    process = ServeProcess(home)
    devices = [ScriptedDevice(mosquitto.url, code, n) for n, code in enumerate(invite(home, 3))]
    ranks = [np.array([0, 50, 3]), np.array([0, 0]), np.array([50, 50, 50, 12])]
    metric = METRICS["ndcg10"]
    assert isinstance(metric, RankMetric)
    try:
        process.start()
        process.await_connections(1)
        for device in devices:
            device.enrol().join()
        with ThreadPoolExecutor(3) as pool:
            for number, point in enumerate(EVALUATION_POINTS, start=1):
                list(pool.map(lambda device, n=number: device.await_round(n), devices))
                process.kill()
                process.start(point, 1)
                began = int(time.time())
                told = pool.map(insist, devices, ranks)
                assert process.wait() == -9, point
                process.start()
                assert [each.verdict for each in told] == [Verdict.COUNTED] * 3
                # What has a receipt is there, as each device's newest outcome too.
                store = home.open_store()
                newest = store.first.participations.all().values()
                store.database.close()
                assert min(each.told_unix_seconds or 0 for each in newest) >= began
        devices[0].await_round(most + 1)
    finally:
        process.kill()
        for device in devices:
            device.disconnect()
    told = evaluations(home, capsys)
    assert [each["version"] for each in told["versions"]] == list(range(most))[::-1]
    for each in told["versions"]:
        (figure,) = [one for one in each["figures"] if one["metric"] == "ndcg10"]
        assert (figure["devices"], figure["samples"]) == (3, 9)
        assert figure["value"] == pytest.approx(metric.value(metric.measure(np.concatenate(ranks))))
    store = home.open_store()
    outcomes = [OutcomeCount(number, "trained", "", 3) for number in range(1, most + 1)]
    assert store.first.reports.outcomes() == outcomes[::-1]
    store.database.close()


def insist(device: ScriptedDevice, ranks: np.ndarray) -> Receipt:
    """Send until there is a receipt, as devices do."""
    digest, payload = contribution(device, ranks)
    until = time.monotonic() + PATIENCE_SECONDS
    while digest not in device.receipts:
        assert time.monotonic() < until, "no receipt"
        device.publish_up(device.sessions.seal(RecordType.CONTRIBUTION, payload))
        again = time.monotonic() + 0.5
        while time.monotonic() < again and digest not in device.receipts:
            device.pump(0.05)
    return device.receipts.pop(digest)


def contribution(device: ScriptedDevice, ranks: np.ndarray) -> tuple[bytes, bytes]:
    """An update with what the device found out: its receipt's digest, and the payload."""
    found = []
    for name in ("hr10", "ndcg10"):
        metric = METRICS[name]
        assert isinstance(metric, RankMetric)
        found.append(Evaluation("global", name, metric.measure(ranks)))
    details = Details("1", "1", "linux", "k=8")
    said = write_evaluations(EvaluationReport(tuple(found)))
    report = encode(Report(ReportedOutcome.TRAINED, "", details, said))
    assert device.manifest is not None
    identity = device.identity_for(device.manifest)
    content = with_report(report, device.body())
    digest = update_digest(identity, hashlib.sha256(content).digest())
    return digest, write_update(identity, content)


def evaluations(home: AggregatorHome, capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict]]:
    capsys.readouterr()
    assert command(home, "evaluations", "--json", "--versions", "50") == 0
    found: dict[str, list[dict]] = json.loads(capsys.readouterr().out)
    return found
