"""Runs in MLflow, below an experiment named after the task: where ``MLFLOW_TRACKING_URI`` says, and
else in the folder ``mlruns`` beside the records (``mlflow ui --backend-store-uri runs/mlruns``)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from aggregator.operate.runs import FINISHED, STOPPED_EARLY
from aggregator.simulate.sinks import RunSink, SinkRun

# Before it is imported: it tells its makers of its use, and lately asks whether a folder will do.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
except ImportError as error:
    raise ImportError(f"{error}: pip install mlflow, or mlflow-skinny") from None

_LONGEST_VALUE = 500
"""What every release takes."""


class MlflowSink(RunSink):
    """A run of MLflow for each run of a seed; its step is the round's number."""

    def begin(self, run: SinkRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").absolute().as_uri()
        self._client: Any = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(run.task)
        experiment = (
            self._client.create_experiment(run.task) if known is None else known.experiment_id
        )
        tags = {"tessera.run": run.name, "tessera.seed": str(run.seed)}
        name = f"{run.name}, seed {run.seed}"
        begun = self._client.create_run(experiment, tags=tags, run_name=name)
        self._id, self._began = begun.info.run_id, begun.info.start_time
        said = {**run.settings, "seed": run.seed}
        params = [Param(key, _text(value)) for key, value in said.items() if key != "seeds"]
        self._client.log_batch(self._id, params=params)

    def round(self, number: int, values: Mapping[str, float]) -> None:
        metrics = [Metric(key, value, self._began, number) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, state: str, number: int, values: Mapping[str, float]) -> None:
        self.round(number, values)
        self._client.set_tag(self._id, "tessera.state", state)
        over = state in (FINISHED, STOPPED_EARLY)
        self._client.set_terminated(self._id, "FINISHED" if over else "KILLED")


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:_LONGEST_VALUE]
