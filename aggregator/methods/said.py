"""What methods say of their rounds, for people: the names in ``RoundSummary.metrics`` and what they
mean. ``docs/operating/models.md`` has the table, the console the sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class SaidOfRound(NamedTuple):
    """``by``: which methods say it, and with which setting alone."""

    by: str
    means: str


ROUND_METRICS: Mapping[str, SaidOfRound] = {
    "loss": SaidOfRound(
        "fedavg, attention", "the devices' mean loss in training; each counts once"
    ),
    "update_norm": SaidOfRound(
        "fedavg", "length of the mean difference, by which the model's parameters moved"
    ),
    "weight": SaidOfRound(
        "fedavg", "what stands behind that mean: samples, or devices where each counts alike"
    ),
    "gradient_norm": SaidOfRound(
        "scatter", "length of the gradient, over all items, that the items' vectors went along"
    ),
    "columns_mean": SaidOfRound("scatter", "how many columns a device trained, on average"),
    "unseen_weight": SaidOfRound(
        "scatter, least squares",
        "a0, by rule or chosen: weight of any item's squared score, where one's own items have 1",
    ),
    "l2": SaidOfRound(
        "scatter, least squares",
        "lambda, by rule or chosen: weight of the squared lengths of vectors",
    ),
    "effective_columns": SaidOfRound(
        "scatter, least squares",
        "columns that vectors make use of: above four tenths of all, these double",
    ),
    "bounded_items": SaidOfRound(
        "scatter: item_multiple",
        "items whose vectors were too long for how many devices touch them",
    ),
    "bounded_rows": SaidOfRound(
        "scatter: row_multiple", "rows of updates, an item's each, that were too large: scaled down"
    ),
    "outliers": SaidOfRound(
        "fedavg, scatter: outlier_multiple",
        "updates that were left out, since no honest device's looks like them",
    ),
    "clipped": SaidOfRound("any", "updates that were too large, and were scaled down"),
    "fewer_samples": SaidOfRound(
        "any", "updates that claimed far more samples than is usual, and counted for less"
    ),
    "known": SaidOfRound("attention", "devices whose last update is kept, to compare others with"),
    "clusters": SaidOfRound("attention", "groups of devices that are alike"),
    "largest": SaidOfRound("attention", "how many devices are in the largest group"),
    "moved": SaidOfRound("attention", "devices that went from one group to another"),
    "local_loss": SaidOfRound("mutual", "the devices' mean loss on their own samples"),
    "public_loss": SaidOfRound(
        "mutual", "their mean loss on what others share, by the soft labels of its owners"
    ),
    "conflict_share": SaidOfRound(
        "mutual", "share of the steps in which the two losses pulled apart"
    ),
    "owners": SaidOfRound("mutual", "devices that share public samples"),
    "confidence": SaidOfRound(
        "mutual, teacher_logits",
        "share, or mean probability, with which new soft labels get their samples right",
    ),
    "labels": SaidOfRound("prototypes, teacher_logits", "labels that the fleet knows something of"),
    "bounded": SaidOfRound(
        "prototypes, teacher_logits", "a device's means of single labels that lay out of bounds"
    ),
    "server_loss": SaidOfRound(
        "prototypes",
        "loss of the aggregator's own training; -1: it failed, and prototypes stay as they were",
    ),
}
