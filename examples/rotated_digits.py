"""Four devices with four different networks teach each other digits, each turned another way.

    python -m examples.rotated_digits
    python -m examples.rotated_digits --rounds 4 --each 30      (a look in a minute)

Each device sees MNIST digits in one rotation (0, 20, 40 or 60 degrees) and has a network of its own
design. A tenth of its images it shows to the others, once; from then on it sends what its network
thinks of them, some kilobytes a round, through a real MQTT broker. No weights travel, and there is
no global model. Afterwards every device is measured on all rotations, beside a twin that trained
as many steps alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# Official onnxruntime wheels write to the user's cache folder unless this is set before the import.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
from rich.console import Console
from rich.table import Table

from aggregator.demo.fleet import FleetMember, FleetTask, LocalFleet, local_fleet, round_bar
from benchmarks.mutual.domains import Domain, rotated_mnist
from device_sdk import Device, LocalData, Trainer, TrainingOptions
from device_sdk.methods.local_steps import SampleStream, predict_all
from device_sdk.system.command_line import positive_int
from examples.program import carried_out, how_often, option_parser
from examples.rotated_picture import draw_picture
from export import Adam
from export.models.images import image_recipe
from export.models.mutual import mutual_recipe

NETWORKS = {"M0": "lenet", "M20": "vgg", "M40": "resnet", "M60": "alexnet"}
"""Device to architecture, the cheapest to train first."""

_STEPS = 20
_BATCH = 32


@dataclass(frozen=True)
class Accuracy:
    """Of one network, in percent: on the test images of its own rotation, and of the others."""

    own: float
    others: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 on success, 1 where a step failed, 2 for a wrong command line."""
    arguments = _parser().parse_args(argv)
    return carried_out("rotated_digits", partial(_run, arguments))


def _run(arguments: argparse.Namespace, console: Console) -> None:
    out: Path = arguments.out
    rng = np.random.default_rng(arguments.seed)
    domains = rotated_mnist(arguments.data, 0.10, "by-image", rng, arguments.each)
    console.print(
        f"{len(domains)} devices, {len(domains[0].private['y'])} private and "
        f"{len(domains[0].public['y'])} public images each; test images are new to all of them"
    )
    folders = _export(out, console)
    task = FleetTask(
        "mutual",
        list(folders.values()),
        rounds=arguments.rounds,
        settings={
            "training": {
                "classes": 10,
                "local_steps": _STEPS,
                "batch_size": _BATCH,
                "learning_rate": 0.002,
            }
        },
        deadline_seconds=600.0,
    )
    members = [
        FleetMember(
            domain.name,
            LocalData(domain.private, domain.public),
            TrainingOptions(artifact=NETWORKS[domain.name]),
        )
        for domain in domains
    ]
    shutil.rmtree(out / "fleet", ignore_errors=True)  # of the run before
    with local_fleet(task, members, out / "fleet") as fleet:
        curves = _follow(fleet, domains, console)
        fleet.settle()
        sent = fleet.sent_bytes()
        together = {domain.name: _accuracy(fleet.devices, domain, domains) for domain in domains}
    alone = {
        domain.name: _alone(domain, domains, out, arguments.rounds * _STEPS, arguments.seed)
        for domain in domains
    }
    console.print(_table(together, alone, sent))
    gained = np.mean([together[name].others - alone[name].others for name in together])
    console.print(
        f"On rotations that a device never had, it is right {how_often(gained)} than after "
        "training alone."
    )
    picture = draw_picture(
        out / "rotated_digits.png",
        {domain.name: domain.private["x"] for domain in domains},
        curves,
        {name: (alone[name].own, alone[name].others) for name in alone},
    )
    console.print(f"picture: {picture}", highlight=False)


def _export(out: Path, console: Console) -> dict[str, Path]:
    """The four artifacts, smallest first, exported where they are not there yet."""
    found = {}
    for network in NETWORKS.values():
        folder = out / "artifacts" / network
        if not (folder / "manifest.json").exists():
            with console.status(f"exporting {network}: forward, loss, gradients, optimizer"):
                mutual_recipe(network).export(folder, verify=False)
        found[network] = folder
    return found


def _follow(
    fleet: LocalFleet, domains: Sequence[Domain], console: Console
) -> dict[str, list[tuple[int, float, float]]]:
    """Progress, and for each device (round, own, others) after each round."""
    curves: dict[str, list[tuple[int, float, float]]] = {domain.name: [] for domain in domains}
    with round_bar(console, fleet.task.rounds, "devices enrol and train") as show:
        for row in fleet.rounds():
            means = []
            for domain in domains:
                found = _accuracy(fleet.devices, domain, domains)
                curves[domain.name].append((row.round, found.own, found.others))
                means.append((found.own, found.others))
            own, others = np.mean(means, axis=0)
            conflicts = row.metrics.get("conflict_share")
            said = "" if conflicts is None else f", {conflicts:.0%} of steps in conflict"
            show(row.round, f"own rotation {own:.1f} %, others {others:.1f} %{said}")
    return curves


def _accuracy(devices: Mapping[str, Device], domain: Domain, domains: Sequence[Domain]) -> Accuracy:
    rights = [
        (one is domain, devices[domain.name].predict({"x": one.test["x"]}), one.test["y"])
        for one in domains
    ]
    return _split_accuracy(
        [(own, found["probabilities"].argmax(axis=1) == y) for own, found, y in rights]
    )


def _alone(domain: Domain, domains: Sequence[Domain], out: Path, steps: int, seed: int) -> Accuracy:
    """A twin of the device's network, on the same images and for as many steps, by itself."""
    network = NETWORKS[domain.name]
    folder = out / "artifacts" / f"{network}-alone"
    if not (folder / "manifest.json").exists():
        # The same first weights as the device's artifact: the exporter's seed is the same.
        image_recipe(network).export(folder, optimizer=Adam(lr=0.002), verify=False)
    trainer = Trainer(folder, providers="cpu")
    samples = {
        name: np.concatenate([domain.private[name], domain.public[name]]) for name in ("x", "y")
    }
    stream = SampleStream(samples, _BATCH, np.random.default_rng(seed))
    for _ in range(steps):
        trainer.step(stream.draw())
    return _split_accuracy(
        [
            (
                one is domain,
                predict_all(trainer, {"x": one.test["x"]}, "probabilities").argmax(axis=1)
                == one.test["y"],
            )
            for one in domains
        ]
    )


def _split_accuracy(rights: Sequence[tuple[bool, np.ndarray]]) -> Accuracy:
    own = np.concatenate([right for is_own, right in rights if is_own])
    others = np.concatenate([right for is_own, right in rights if not is_own])
    return Accuracy(100 * float(own.mean()), 100 * float(others.mean()))


def _table(
    together: Mapping[str, Accuracy],
    alone: Mapping[str, Accuracy],
    sent: Mapping[str, int],
) -> Table:
    table = Table(title="Accuracy in percent: together (alone)")
    for name in ("device", "network", "own rotation", "other rotations", "sent"):
        table.add_column(name, justify="left" if name in ("device", "network") else "right")
    for name, network in NETWORKS.items():
        mine, twin = together[name], alone[name]
        table.add_row(
            name,
            network,
            f"{mine.own:.1f} ({twin.own:.1f})",
            f"{mine.others:.1f} ({twin.others:.1f})",
            f"{sent[name] / 1000:,.0f} kB",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = option_parser("rotated_digits", __doc__, rounds=15, holds="mnist/")
    parser.add_argument(
        "--each", type=positive_int, default=100, help="images a digit and device (default: 100)"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
