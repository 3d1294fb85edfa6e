"""Rounds in JAX without a framework: the whole fleet as one function: ``jax_rounds.py WORKLOAD``.

A lower bound rather than a simulator: there are no devices' updates, only their sum, so that none
could be checked, bounded, dropped or sent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.turns import take_turns
from benchmarks.peers.workload import Floats, Workload


class JaxRounds:
    """See :class:`~turns.Framework`."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.items: Floats = workload.items
        self.users: Floats = workload.users
        owner = np.repeat(np.arange(workload.devices), np.diff(workload.begin))
        self._user = jnp.asarray(owner, dtype=jnp.int32)
        self._positive = jnp.asarray(workload.positive, dtype=jnp.int32)
        self._weight = jnp.asarray(workload.weight)
        self._gradients = jax.jit(jax.grad(self._loss, argnums=(0, 1)))

    def _loss(
        self, items: jax.Array, users: jax.Array, negative: jax.Array, *constant: jax.Array
    ) -> jax.Array:
        user, positive, weight = constant
        # All scores of all users; the gradients are then two more products.
        scores = users @ items.T
        margin = scores[user, positive] - scores[user, negative]
        by_item, by_user = jnp.square(items).sum(axis=1), jnp.square(users).sum(axis=1)
        work = self._workload
        shrunk = work.user_l2 * by_user[user] + work.item_l2 * (
            by_item[positive] + by_item[negative]
        )
        return jnp.vdot(weight, jax.nn.softplus(-margin) + shrunk / 2)

    def prepare(self, number: int) -> None:
        self._negative = jnp.asarray(self._workload.negative[number], dtype=jnp.int32)

    def round(self, number: int) -> None:
        constant = (self._user, self._positive, self._weight)
        by_item, by_user = self._gradients(self.items, self.users, self._negative, *constant)
        self.users = self.users - self._workload.user_rates[:, None] * np.asarray(by_user)
        self.items = self._workload.server_step(self.items, np.asarray(by_item))


if __name__ == "__main__":
    take_turns(("jax", "jaxlib", "numpy"), JaxRounds)
