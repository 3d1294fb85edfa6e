"""Write evaluation.json: test vectors of evaluations and of the terms that ask for them.

    python tests/vectors/generate_evaluation.py [--check]

``--check`` writes nothing and fails when the file would change.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from device_sdk.evaluation.metrics import METRICS, PredictionMetric, RankMetric
from device_sdk.evaluation.report import (
    Evaluation,
    EvaluationReport,
    EvaluationTerms,
    write_evaluations,
)
from device_sdk.fields import plain
from device_sdk.wire.codec import cbor
from device_sdk.wire.publish.manifest import evaluates, is_control
from tests.vectors.generate_codecs import MANIFEST
from tests.vectors.written import write

FILE = Path(__file__).with_name("evaluation.json")
TERMS = EvaluationTerms(("loss", "auc"), every_rounds=2, share=0.5, least_samples=3, control=0.25)
PROBABILITIES = np.array([0.125, 0.875, 0.5, 0.25], dtype=np.float32)
CLASSES = np.array([0, 1, 1, 0], dtype=np.int64)
RANKS = np.array([0, 2, 10, 30], dtype=np.int64)
"""With gains that every library's logarithm gives to the last bit."""


def evaluations() -> EvaluationReport:
    """Every metric once, of four samples or users, and the loss of all stages."""
    loss = np.array([4, 1.75])
    found = [Evaluation("global", "loss", loss), Evaluation("personal", "loss", loss / 2)]
    found.append(Evaluation("alone", "loss", loss / 4))
    for name, metric in METRICS.items():
        if name == "log_loss":
            statistics = np.array([4, 2.25])
        elif isinstance(metric, PredictionMetric):
            statistics = metric.measure(PROBABILITIES, CLASSES, "probabilities")
        elif isinstance(metric, RankMetric):
            statistics = metric.measure(RANKS)
        else:
            continue
        found.append(Evaluation("global", name, statistics))
    return EvaluationReport(tuple(found), "out-of-time")


def build() -> dict[str, Any]:
    """The file's content."""
    report = evaluations()
    return {
        "terms": {"encoding": cbor.encode(plain(TERMS)).hex(), "threshold": TERMS.threshold},
        "evaluates": [
            {
                "device_id": device.hex(),
                "evaluates": evaluates(MANIFEST, TERMS, device),
                "control": is_control(TERMS, MANIFEST.task, device),
            }
            for device in (bytes((number,)) * 16 for number in range(6))
        ],
        "report": {
            "encoding": write_evaluations(report).hex(),
            "reason": report.reason,
            "results": [
                {
                    "stage": each.stage,
                    "metric": each.metric,
                    "value": each.value,
                    "statistics": {
                        str(place): float(each.statistics[place])
                        for place in np.flatnonzero(each.statistics)
                    },
                }
                for each in report.results
            ],
        },
        "empty_report": write_evaluations(EvaluationReport()).hex(),
    }


def text() -> str:
    """The file's content, as text."""
    return json.dumps(build(), indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(write(FILE, text()))
