"""The train graph's formula in float64 NumPy: the oracle for the exported step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.scatter.factor_step import FactorBatch, FactorGradients


def reference_loss(
    users: NDArray[np.float64], items: NDArray[np.float64], batch: FactorBatch
) -> float:
    u, p, n = users[batch.user], items[batch.positive], items[batch.negative]
    margin = np.sum(u * (p - n), axis=1) + batch.offset
    penalty = batch.user_l2 / 2 * np.sum(u * u, axis=1)
    penalty += batch.item_l2 / 2 * (np.sum(p * p, axis=1) + np.sum(n * n, axis=1))
    return float(np.sum(batch.weight * (np.logaddexp(0, -margin) + penalty)))


class ReferenceStep:
    """A FactorStep without onnxruntime."""

    def gradients(
        self, users: NDArray[np.float32], items: NDArray[np.float32], batch: FactorBatch
    ) -> FactorGradients:
        wide_users, wide_items = users.astype(np.float64), items.astype(np.float64)
        u, p, n = wide_users[batch.user], wide_items[batch.positive], wide_items[batch.negative]
        weight = batch.weight.astype(np.float64)[:, None]
        margin = np.sum(u * (p - n), axis=1) + batch.offset
        pull = -weight * np.exp(-np.logaddexp(0, margin))[:, None]
        user_gradient = np.zeros_like(wide_users)
        item_gradient = np.zeros_like(wide_items)
        np.add.at(user_gradient, batch.user, pull * (p - n) + weight * batch.user_l2 * u)
        np.add.at(item_gradient, batch.positive, pull * u + weight * batch.item_l2 * p)
        np.add.at(item_gradient, batch.negative, -pull * u + weight * batch.item_l2 * n)
        return FactorGradients(
            users=user_gradient.astype(np.float32),
            items=item_gradient.astype(np.float32),
        )
