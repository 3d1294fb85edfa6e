"""What papers/afd reports on MovieLens: tables 5 to 7, and section 3.3 for ACC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaperFigures:
    """None where the paper gives no figure. ``by_device``: MAE of devices A to D (table 5).

    ``minutes``: training time for 400 iterations of 128 samples.
    """

    accuracy: float | None = None
    auc: float | None = None
    ndcg: float | None = None
    mae: float | None = None
    by_device: tuple[float, ...] = ()
    minutes: float | None = None


PAPER: Mapping[str, PaperFigures] = {
    "AFD": PaperFigures(0.84, 0.78, 0.92, 0.19, (0.15, 0.23, 0.20, 0.17), 13.4),
    "FD": PaperFigures(None, 0.69, 0.81, 0.24, (0.18, 0.27, 0.26, 0.23), 32.0),
    "FD + KL + L2": PaperFigures(None, 0.72, 0.83, 0.23, (), 34.6),
    "FD + attention": PaperFigures(None, 0.75, 0.87, 0.21, (), 37.2),
    "FD + segmented": PaperFigures(None, 0.69, 0.81, 0.24, (), 12.7),
    "FedAvg, Wide & Deep": PaperFigures(None, None, 0.82, 0.29, (0.24, 0.33, 0.31, 0.28)),
    "FedAvg, DIN": PaperFigures(None, None, 0.85, 0.21, (0.16, 0.25, 0.22, 0.21)),
}
"""By this benchmark's names of rows. Table 6's AUC of FWD and FDIN is for both with attention."""
