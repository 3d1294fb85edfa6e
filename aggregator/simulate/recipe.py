"""How devices train in a round, in words: by the task, and by the defaults where it is silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from aggregator.task.file import Task
from device_sdk.artifact.manifest import Manifest
from device_sdk.methods.local_steps import LEAST_STEPS


def training_of(task: Task) -> object:
    """What the task's broadcasts tell devices of their training, where its method has such."""
    return getattr(task.binding.settings, "training", None)


def in_one_pass(task: Task) -> Task:
    """The same, where it leaves the passes to the number of samples: a rehearsal has many cases."""
    settings, training = task.binding.settings, training_of(task)
    if getattr(training, "epochs", None) != 0:
        return task
    settings = replace(settings, training=replace(cast(Any, training), epochs=1))
    return replace(task, binding=replace(task.binding, settings=settings))


def recipe_of(task: Task, manifest: Manifest) -> str:
    """Passes and rate, as ``, 2 passes, at a rate of 0.1``; empty where the method has none."""
    training = training_of(task)
    epochs, rate = (getattr(training, name, None) for name in ("epochs", "learning_rate"))
    said = ""
    if epochs is not None:
        passes = f"{epochs} pass{'es' * (epochs != 1)}"
        said = f", {passes if epochs else f'as many passes as {LEAST_STEPS} steps take'}"
    if rate:
        said += f", at a rate of {rate:g}"
    elif rate == 0 and manifest.rate is not None:
        by = "found by its export's trial" if manifest.rate_by_trial else "its author's"
        said += f", at the artifact's rate of {manifest.rate:g} ({by})"
    return said
