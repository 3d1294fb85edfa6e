from __future__ import annotations

from benchmarks.export_survey.subject import Kind, TrainStep

KIND = Kind("autoencoders")
