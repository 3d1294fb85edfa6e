"""A fleet whose devices train unequal parts of one model, over a real broker, through a kill -9."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import export
from aggregator.home import AggregatorHome
from device_sdk import LocalData, TrainingOptions
from device_sdk.device import Device
from device_sdk.home.home import Home
from tests.brokers.mosquitto import Mosquitto
from tests.fakes import personal_ladders
from tests.fakes.homes import ServeProcess, command, invite
from tests.fakes.outputs import output_of
from tests.fakes.quick import joined, opened
from tests.fakes.waiting import NEVER_SECONDS, wait_until

FEATURES, CLASSES, ROUNDS = 96, 3, 5
samples = partial(personal_ladders.samples, features=FEATURES)
RUNGS = ("1of8", "1of4", "full")
_TASK = """
[task]
method = "fedavg"
artifact = "{ladder}"
[broker]
url = "{url}"
[round]
quorum = 4
wait_for_devices = 4
deadline_seconds = {never}
train_seconds = 60.0
most_rounds = {rounds}
[fedavg.training]
learning_rate = 0.1
"""
_EVALUATED = "[evaluation]\nleast_devices = 1\n"


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    return cross_entropy(logits, batch["label"]), {"logits": logits}


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("ladder") / "net"
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    export.submodels(
        model,
        loss,
        {"x": torch.rand(4, FEATURES), "label": torch.tensor([0, 1, 2, 0])},
        ranks=(1 / 8, 1 / 4, 1),
        optimizer=export.Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        metrics={"accuracy": ("logits", "label")},
        directory=folder,
        verify=False,
    )
    return folder


def test_unequal_devices_learn_one_model_through_the_death_of_the_aggregator(
    mosquitto: Mosquitto, ladder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = AggregatorHome(tmp_path / "fleet")
    assert command(home, "init") == 0
    text = _TASK.format(ladder=ladder, url=mosquitto.url, never=NEVER_SECONDS, rounds=ROUNDS)
    home.task_file.write_text(text + _EVALUATED)
    # Each class takes its rung as it was told to; the last one measures, and affords the full one.
    options = [TrainingOptions(artifact=name) for name in RUNGS] + [TrainingOptions()]
    devices: list[Device] = []
    process = ServeProcess(home)
    try:
        process.start()
        for place, (code, chosen) in enumerate(zip(invite(home, 4), options, strict=True)):
            data = LocalData(samples(place, 40), test=samples(50 + place, 40))
            folder = tmp_path / f"home-{place}"
            devices.append(joined(mosquitto.url, code, folder, data=data, options=chosen))
            devices[-1].start()
        wait_until(lambda: all((each.status().version or 0) >= 2 for each in devices))
        process.kill()
        process.start()
        wait_until(lambda: all(each.status().receipted_round == ROUNDS for each in devices))
        told = [each.status() for each in devices]
        assert [each.artifact for each in told] == [*RUNGS, "full"]
        assert [each.k for each in told] == [1, 2, 3, 3]
        assert all(each.verdict == "counted" and not each.outbox for each in told)
        assert "full takes" in told[3].k_reason
        # What a device sends is of its own part, be some of it sent again after the kill.
        sent = [each.sent_bytes for each in told]
        assert max(sent[:2]) < min(sent[2:])
        # Nobody trains any more, and every device predicts with its part of the last version, or
        # its own where figures say that it is better.
        fresh = samples(99, 200)
        for each in devices:
            logits = each.predict({"x": fresh["x"]})["logits"]
            assert (logits.argmax(axis=1) == fresh["label"]).mean() > 0.8
    finally:
        for each in devices:
            each.close()
        process.kill()
    store = home.open_store()
    try:
        rounds = [store.first.rounds.find(number) for number in range(1, ROUNDS + 1)]
        assert [row.participants for row in rounds if row is not None] == [4] * ROUNDS
        figures = store.first.evaluations.latest()[0].figures
        assert {each.part for each in figures} == {"", *RUNGS}
    finally:
        store.database.close()
    capsys.readouterr()
    assert command(home, "status", "--json") == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert list(task["devices_by_part"].items()) == [("1of8", 1), ("1of4", 1), ("full", 2)]
    assert task["counted_by_part"] == {"1of8": 1.0, "1of4": 1.0, "full": 1.0}
    assert command(home, "devices", "--json") == 0
    listed = [each["tasks"][0]["option"] for each in json.loads(capsys.readouterr().out)]
    assert sorted(listed) == sorted([*RUNGS, "full"])


class Bag(nn.Module):
    """The mean of some words' vectors, and what is made of it."""

    def __init__(self, words: int = 4000, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.hidden(self.words(x).mean(1)).relu())
        return found


def test_a_device_that_changes_its_rung_fetches_no_frozen_values_again(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    backbone, rng = Bag(), np.random.default_rng(1)
    label = rng.integers(CLASSES, size=40)
    x = label[:, None] + CLASSES * rng.integers(5, size=(40, 6))
    rungs = export.submodels(
        lambda rank: export.lora(backbone, rank, trained=("head",)),
        loss,
        {"x": torch.from_numpy(x[:4]), "label": torch.from_numpy(label[:4])},
        widths=(1, 4),
        optimizer=export.Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        directory=tmp_path / "net",
        verify=False,
    )
    home = AggregatorHome(tmp_path / "fleet")
    assert command(home, "init") == 0
    text = _TASK.format(ladder=tmp_path / "net", url=mosquitto.url, never=NEVER_SECONDS, rounds=0)
    home.task_file.write_text(text.replace("= 4\n", "= 1\n"))
    (code,), own = invite(home), tmp_path / "home"
    shared = own / "artifacts" / rungs[0].manifest.shared_file
    more: dict[str, Any] = {"data": LocalData({"x": x, "label": label})}
    process, found = ServeProcess(home), []
    try:
        process.start()
        for name in ("width-1", "width-4"):
            more["options"] = TrainingOptions(artifact=name)
            first = not own.exists()
            device = joined(mosquitto.url, code, own, **more) if first else opened(own, **more)
            device.start()
            wait_until(lambda: device.status().artifact == name and device.status().version)  # noqa: B023
            assert device.status().verdict != "refused"
            weights = device.predict({"x": x})["logits"]
            assert np.isfinite(weights).all()
            device.close()
            found.append((shared.stat().st_ino, shared.stat().st_mtime_ns, shared.stat().st_size))
            with closing(Home(own, read_only=True)) as here:
                state = here.models.learner("default")
                assert state is not None
                # Nor are they written down with what it trained, round by round.
                assert sum(array.nbytes for array in state.values()) < shared.stat().st_size / 10
    finally:
        process.kill()
    assert found[0] == found[1] and found[0][2] > 4 * backbone.words.weight.numel()


def adapted(rank: int) -> nn.Module:
    torch.manual_seed(1)
    return export.lora(personal_ladders.Net(hidden=800), rank, trained=("head",))


def test_devices_keep_parts_of_one_model_as_their_own(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ladder, given = tmp_path / "net", personal_ladders.samples(98, 200)
    rungs = personal_ladders.write_ladder("mutual", ladder, adapted, widths=(1, 4))
    names = [each.manifest.name for each in rungs]
    home = AggregatorHome(tmp_path / "fleet")
    assert command(home, "init") == 0
    text = _TASK.format(ladder=ladder, url=mosquitto.url, never=NEVER_SECONDS, rounds=ROUNDS)
    text = text.partition("[fedavg.training]")[0].replace('"fedavg"', '"mutual"')
    training = f"[mutual.training]\n{personal_ladders.TRAINING['mutual']}\n"
    home.task_file.write_text(text.replace("= 4\n", "= 3\n") + training)
    options = [TrainingOptions(artifact=name) for name in names] + [TrainingOptions()]
    devices: list[Device] = []
    process = ServeProcess(home)
    try:
        process.start()
        for place, (code, chosen) in enumerate(zip(invite(home, 3), options, strict=True)):
            more = {"data": personal_ladders.shown(place), "options": chosen}
            devices.append(joined(mosquitto.url, code, tmp_path / f"home-{place}", **more))
            devices[-1].start()
        wait_until(lambda: all((each.status().version or 0) >= 2 for each in devices))
        process.kill()
        process.start()
        wait_until(lambda: "version 5 is published for good" in process.log.read_text())
        wait_until(lambda: not any(each.status().outbox for each in devices))
        told = [each.status() for each in devices]
        assert [each.artifact for each in told] == [*names, names[1]]
        assert all(each.verdict == "counted" and not each.outbox for each in told)
        for place, each in enumerate(devices):
            found = each.predict({"x": given["x"]})["probabilities"].argmax(axis=1)
            assert (found == given["label"]).mean() > 0.8
            # What all rungs have frozen lies there once.
            shared = tmp_path / f"home-{place}/artifacts" / rungs[0].manifest.shared_file
            assert shared.stat().st_size > 4 * 800 * personal_ladders.WIDTH
        listed = json.loads(output_of(capsys, home, "devices", "--json"))
        assert sorted(each["tasks"][0]["option"] for each in listed) == sorted([*names, names[1]])
        # What serves is what the folder holds; another's is taken by a replacement alone.
        said = output_of(capsys, home, "task", "check")
        assert "rehearsed mutual with 'width-1'" in said and "as it is served" in said
        personal_ladders.write_ladder("mutual", ladder, adapted, widths=(2,))
        said = output_of(capsys, home, "task", "check")
        assert "task.artifact" in said and "task replace" in said
        file = home.folder / "other.toml"
        file.write_text(home.task_file.read_text().replace(f"= {ROUNDS}", f"= {ROUNDS + 2}"))
        output_of(capsys, home, "task", "replace", "default", "--from", str(file), "--now")
        wait_until(lambda: all(each.status().artifact == "width-2" for each in devices[2:]))
    finally:
        for device in devices:
            device.close()
        process.kill()
