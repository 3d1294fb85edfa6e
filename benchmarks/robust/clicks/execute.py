"""Carries out one trial over clicks with the real learners, methods and train graphs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from aggregator.simulate.engine import Simulation
from benchmarks.datasets.click import Clicks
from benchmarks.distill.fleet import Fleet, joined_quality, predictions
from benchmarks.robust.attacks import PROMOTING, SHARES, hostile_devices, unpopular_item
from benchmarks.robust.clicks.catalogue import Catalogue, seen_by, watchers
from benchmarks.robust.clicks.experiment import Experiment, Outcome
from benchmarks.robust.clicks.fleet import TrainerShelf, build_fleet
from benchmarks.robust.suite import Trial
from device_sdk.trainer import Trainer


def execute(
    trial: Trial[Experiment],
    clicks: Clicks,
    shelf: TrainerShelf,
    progress: Callable[[str], None],
) -> Outcome:
    """Train and evaluate; ``progress`` is called with a line of text after each round.

    Every trial of a seed has the same first weights, the same order in which devices turn hostile,
    the same item to promote and the same users who may see it: differences are paired.
    """
    experiment = trial.experiment
    training, attacking, turning, choosing, watching = np.random.SeedSequence(
        experiment.seed
    ).spawn(5)
    catalogue = Catalogue(clicks)
    order = np.random.default_rng(turning).permutation(len(clicks.devices))
    item = unpopular_item(catalogue.known, np.random.default_rng(choosing))
    hostile = hostile_devices(order, trial.share)
    honest = np.setdiff1d(order, hostile).tolist()
    trainers = shelf.trainers(experiment)
    seeds = (training, attacking)
    fleet = build_fleet(trial, clicks, catalogue, trainers, hostile.tolist(), item, seeds)
    best_round, by_round, seconds = _train(
        fleet, trainers, clicks, honest, experiment.rounds, progress
    )
    clean = (0.0, 1 / len(clicks.devices), *SHARES)
    shares = clean if trial.attack is None else (trial.share,)
    rest = {str(one): set(honest).difference(hostile_devices(order, one)) for one in shares}
    found = {
        device: predictions(trainers[device], getattr(clicks.devices[device], experiment.split))
        for device in honest
    }
    quality = {
        share: joined_quality([found[device] for device in sorted(devices)])
        for share, devices in rest.items()
    }
    click, exposure = dict[str, float](), dict[str, float]()
    if trial.attack is None or trial.attack in PROMOTING:
        shown = watchers(clicks, item, np.random.default_rng(watching))
        seen = [
            (one.device, *seen_by(one, trainers[one.device], catalogue, item))
            for one in shown
            if one.device in rest[str(shares[0])]
        ]
        for share, devices in rest.items():
            of_rest = [(wanted, best) for device, wanted, best in seen if device in devices]
            click[share], exposure[share] = (float(mean) for mean in np.mean(of_rest, axis=0))
    auc = {share: one.auc for share, one in quality.items()}
    progress(f"AUC {auc}, click {click}, exposure {exposure}, round {best_round}, {seconds:.0f} s")
    loss = {share: one.loss for share, one in quality.items()}
    return Outcome(auc, loss, click, exposure, best_round, seconds, by_round)


def _train(
    fleet: Fleet,
    trainers: Sequence[Trainer],
    clicks: Clicks,
    honest: Sequence[int],
    rounds: int,
    progress: Callable[[str], None],
) -> tuple[int, tuple[float, ...], float]:
    """The round with the least validation loss over the honest devices, whose trainers hold its
    models in the end; the validation AUC after each round; the processor time of all rounds in
    seconds."""
    simulation = Simulation(fleet.method, fleet.learners, np.random.default_rng(0))
    least, best_round, seconds = math.inf, 0, 0.0
    kept = dict[int, dict[str, NDArray[np.float32]]]()
    by_round = []
    for round_id in range(1, rounds + 1):
        # Processor time: on a shared machine the wall clock measures the neighbours too.
        began = time.process_time()
        simulation.round()
        seconds += time.process_time() - began
        if simulation.failures:
            raise RuntimeError(f"devices failed or were refused: {simulation.failures}")
        found = [
            predictions(fleet.predictor(one), clicks.devices[one].validation) for one in honest
        ]
        quality = joined_quality(found)
        by_round.append(quality.auc)
        loss = quality.loss
        if loss < least:
            least, best_round = loss, round_id
            kept = {device: fleet.predictor(device).parameters for device in honest}
        progress(f"round {round_id}/{rounds}, validation loss {loss:.4f}, least {least:.4f}")
    if not kept:
        raise RuntimeError("the validation loss of no round is finite")
    for device, parameters in kept.items():
        trainers[device].set_parameters(parameters)
    return best_round, tuple(by_round), seconds
