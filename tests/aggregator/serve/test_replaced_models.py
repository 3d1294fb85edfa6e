"""A fleet's model is replaced by another, and by another method: its devices stay enrolled."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import export
from aggregator.home import AggregatorHome
from aggregator.keys.folder import initialise
from device_sdk.device import Device
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.array_device import local_data
from tests.fakes.brisk import BRISK
from tests.fakes.handmade import FEATURES, TARGETS
from tests.fakes.homes import command, invite, serving
from tests.fakes.outputs import output_of
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS, wait_until

DEVICES = 2


class Deep(torch.nn.Module):
    """With the head that the plain model is, behind a layer of its own."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            *(torch.nn.Linear(FEATURES, FEATURES) for _ in range(depth))
        )
        self.head = torch.nn.Linear(FEATURES, TARGETS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def write_model(folder: Path, depth: int) -> None:
    torch.manual_seed(depth)
    export.train_step(
        Deep(depth),
        lambda model, batch: torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]),
        {"x": torch.randn(5, FEATURES), "y": torch.randn(5, TARGETS)},
        optimizer=export.Sgd(lr=0.05),
        dynamic={name: {0: "batch"} for name in ("x", "y")},
        predict=lambda model, batch: {"prediction": model(batch["x"])},
        directory=folder,
        verify=False,
    )


def task(url: str, method: str, model: str, more: str = "") -> str:
    return (
        f'[task]\nmethod = "{method}"\nartifacts = ["../{model}"]\n[broker]\nurl = "{url}"\n'
        f"[round]\nquorum = {DEVICES}\ndeadline_seconds = {NEVER_SECONDS}\n"
        f"pause_seconds = 0.2\n{more}\n"
    )


@pytest.mark.slow
def test_devices_train_on_when_model_and_method_are_replaced(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for depth in (0, 1):
        write_model(tmp_path / f"model-{depth}", depth)
    home = AggregatorHome(tmp_path / "home")
    initialise(home, int(time.time()), os.urandom)
    home.task_file.write_text(task(mosquitto.url, "fedavg", "model-0"))
    codes = invite(home, DEVICES)
    devices: list[Device] = []
    with serving(home) as served:
        try:
            for place, code in enumerate(codes):
                device = Device.enrol(
                    mosquitto.url,
                    code,
                    tmp_path / f"device-{place}",
                    pace=BRISK,
                    link_settings=QUICK,
                    data=local_data(place),
                    timeout_seconds=PATIENCE_SECONDS,
                )
                devices.append(device)
                device.start()
            wait_until(lambda: served.parts.first.aggregation.version >= 2)
            ids = {row.device_id for row in served.parts.store.devices.all()}

            # A deeper model: its head is what there was.
            deeper = tmp_path / "home" / "deeper.toml"
            deeper.write_text(task(mosquitto.url, "fedavg", "model-1"))
            name = ("replace", "default", "--from", str(deeper), "--warm-start")
            capsys.readouterr()
            generation = served.parts.first.rounds.generation
            assert "nothing that fits body.0.bias, body.0.weight" in output_of(
                capsys, home, "task", *name
            )
            wait_until(lambda: served.parts.first.rounds.generation > generation)
            store = served.parts.first.store
            begun = served.parts.first.aggregation.version
            first = store.checkpoints.get("version")
            assert first is not None and "model-1" in (store.fleet.tasks.find(1).served or "")
            wait_until(lambda: served.parts.first.aggregation.version >= begun + 2)
            for device in devices:
                assert device.status().artifact == "model-1"

            # Another method: every device starts afresh with it.
            other = tmp_path / "home" / "attention.toml"
            more = "[attention.training]\nwarm_up_rounds = 1"
            other.write_text(task(mosquitto.url, "attention", "model-1", more))
            assert command(home, "task", "replace", "default", "--from", str(other), "--now") == 0
            begun = served.parts.first.aggregation.version
            wait_until(lambda: served.parts.first.aggregation.version >= begun + 2)
            assert served.parts.first.task.binding.method_name == "attention"
            assert {row.device_id for row in served.parts.store.devices.all()} == ids
            said = devices[0].predict({"x": np.ones((3, FEATURES), np.float32)})
            assert said["prediction"].shape == (3, TARGETS)
        finally:
            for device in devices:
                device.close()
    assert command(home, "task", "check") == 0
