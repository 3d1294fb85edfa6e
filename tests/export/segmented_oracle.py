"""AFD's equations 10 to 19 in NumPy float64, with all of the past kept: slow and plain."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class SegmentedOracle:
    """One flat parameter vector; ``step`` gives the next one."""

    lr: float
    q: int
    mu1: float
    sigma: float
    xi: float
    eps: float
    gradients: list[np.ndarray] = field(default_factory=list)
    moments: list[np.ndarray] = field(default_factory=list)
    average: float = 0.0
    eta_sgd: float = 0.0
    eta: float = 0.0
    switched_at: int = 0

    def step(self, w: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        gradient = gradient.astype(np.float64)
        self.gradients.append(gradient)
        z = len(self.gradients)
        window = self.gradients[max(0, z - 1 - self.q) :]
        # Equations 11 and 12. V of step z - q is moments[z - q - 1].
        phi = np.max(np.square(window), axis=0)
        before = self.moments[z - self.q - 1] if z > self.q else np.zeros_like(phi)
        v = self.mu1 * before + (1 - self.mu1) * phi
        self.moments.append(v)
        if self.switched_at:
            return w - 0.5 * self.eta * gradient
        # Equations 13 to 15.
        m = np.sum(window, axis=0) / len(window)
        corrected = v / (1 - self.mu1 ** (math.floor((z - 1) / self.q) + 1))
        delta = self.lr * m / (np.sqrt(corrected) + self.eps)
        # Equations 16 to 19.
        along = float(delta @ gradient)
        if along > 0:
            self.eta_sgd = float(delta @ delta) / along
            self.average = self.sigma * self.average + (1 - self.sigma) * self.eta_sgd
        self.eta = self.average / (1 - self.sigma**z)
        if along > 0 and z > 1 and abs(self.eta - self.eta_sgd) < self.xi:
            self.switched_at = z
        return w - delta
