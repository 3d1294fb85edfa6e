"""The train steps of the survey, a file a kind, each as its package or its paper's code has it."""

from __future__ import annotations

from benchmarks.export_survey.steps import (
    audio,
    autoencoders,
    clicks,
    factorisation,
    graphs,
    sequences,
    series,
    setups,
    text,
    vision,
)
from benchmarks.export_survey.subject import Subject


def subjects() -> list[Subject]:
    """All, kind after kind."""
    kinds = (
        clicks.KIND,
        factorisation.KIND,
        sequences.KIND,
        series.KIND,
        audio.KIND,
        graphs.KIND,
        autoencoders.KIND,
        text.KIND,
        vision.KIND,
        setups.KIND,
    )
    return [subject for kind in kinds for subject in kind.subjects]
