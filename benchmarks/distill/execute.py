"""Carries out one experiment with the real learners, methods, graphs and encodings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from aggregator.simulate.engine import Simulation
from benchmarks.channels import DistillChannel
from benchmarks.datasets.click import ClickDevice, Clicks
from benchmarks.distill.experiment import GLOBAL, Experiment, Outcome, Point
from benchmarks.distill.fleet import ArtifactShelf, Fleet, build_fleet, joined_quality, predictions
from benchmarks.recommendation.click_metrics import click_quality
from device_sdk.wire.arrays.tensors import Codec

_DEVICE_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def execute(
    experiment: Experiment,
    clicks: Clicks,
    shelf: ArtifactShelf,
    progress: Callable[[str], None],
) -> Outcome:
    """Train for ``experiment.rounds``; validate after each, and test the best so far.

    Args:
        clicks: the data that ``experiment.data`` names.
        shelf: exports what is missing.
        progress: called with one line of text after each round.
    """
    # One stream a purpose: changing one part of an experiment leaves the others' draws alone.
    order, fleets, coding = np.random.SeedSequence(experiment.seed).spawn(3)
    fleet = build_fleet(experiment, clicks, shelf, fleets)
    exact = experiment.method != "fedavg"
    channel = DistillChannel(Codec.FLOAT16, np.random.default_rng(coding), exact_broadcasts=exact)
    rng = np.random.default_rng(order)
    simulation = Simulation(fleet.method, fleet.learners, rng, channel)
    count = len(fleet.learners)
    honest = len(clicks.devices) - experiment.noisy
    present = max(1, round(experiment.present * count))
    curve: list[Point] = []
    seconds = 0.0
    for round_id in range(1, experiment.rounds + 1):
        chosen = sorted(rng.choice(count, present, replace=False).tolist())
        # Processor time: on a shared machine the wall clock measures the neighbours too.
        began = time.process_time()
        simulation.round(chosen)
        seconds += (time.process_time() - began) / count
        best = min((point.validation_loss for point in curve), default=math.inf)
        curve.append(_evaluate(round_id, seconds, fleet, clicks.devices[:honest], best))
        progress(
            f"round {round_id}/{experiment.rounds}, {seconds:.0f} s a device, validation loss "
            f"{curve[-1].validation_loss:.4f}, least {min(best, curve[-1].validation_loss):.4f}"
        )
    if simulation.failures:
        raise RuntimeError(f"devices failed or were refused: {simulation.failures}")
    sizes = fleet.predictor(0).parameters.values()
    return Outcome(
        curve=tuple(curve),
        up_bytes=channel.up_bytes,
        down_bytes=channel.down_bytes,
        parameters=sum(array.size for array in sizes),
    )


def _evaluate(
    round_id: int, seconds: float, fleet: Fleet, devices: Sequence[ClickDevice], best: float
) -> Point:
    """Test samples are looked at only where the round is better than ``best`` on validation."""
    losses = [
        click_quality(*predictions(fleet.predictor(place), device.validation)).loss
        for place, device in enumerate(devices)
    ]
    loss = float(np.average(losses, weights=[len(one.validation["label"]) for one in devices]))
    if not math.isfinite(loss):
        raise RuntimeError(f"the validation loss of round {round_id} is not finite")
    if loss >= best:
        return Point(round_id, loss, seconds, {}, fleet.switched)
    found = [predictions(fleet.predictor(place), one.test) for place, one in enumerate(devices)]
    quality = {_DEVICE_NAMES[place]: click_quality(*one) for place, one in enumerate(found)}
    quality[GLOBAL] = joined_quality(found)
    return Point(round_id, loss, seconds, quality, fleet.switched)
