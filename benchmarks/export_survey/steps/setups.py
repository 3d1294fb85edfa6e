"""Set-ups: how training is arranged around a model."""

from __future__ import annotations

from benchmarks.export_survey.subject import Kind, TrainStep

KIND = Kind("set-ups")
