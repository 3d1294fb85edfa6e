"""Rounds in FedJAX: ``fedjax_rounds.py WORKLOAD``.

``for_each_client`` on its ``jit`` backend, the default; a client's triples are one batch, padded to
a power of two by FedJAX, so that few shapes are compiled. FedJAX's ``tree_sum`` adds the updates.
"""

from __future__ import annotations

from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.turns import take_turns
from benchmarks.peers.workload import Floats, Workload

Arrays = dict[str, Any]


def _loss(parameters: Arrays, batch: Arrays, user_l2: float, item_l2: float) -> jax.Array:
    items, user = parameters["items"], parameters["user"]
    # One product and reads from it are several times faster here than the triples' own vectors.
    scores, squares = items @ user, jnp.square(items).sum(axis=1)
    positive, negative = batch["positive"], batch["negative"]
    shrunk = user_l2 * jnp.vdot(user, user) + item_l2 * (squares[positive] + squares[negative])
    each = jax.nn.softplus(scores[negative] - scores[positive]) + shrunk / 2
    return jnp.where(batch[fedjax.EXAMPLE_MASK_KEY], batch["weight"] * each, 0).sum()


class FedJaxRounds:
    """See :class:`~turns.Framework`."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.items: Floats = workload.items
        self._users: list[Any] = list(workload.users)
        gradients = jax.grad(_loss)

        def client_init(items: jax.Array, client: Arrays) -> Arrays:
            return {"items": items, **client, "gradient": jnp.zeros_like(items)}

        def client_step(state: Arrays, batch: Arrays) -> Arrays:
            found = gradients(state, batch, workload.user_l2, workload.item_l2)
            moved = state["user"] - state["rate"] * found["user"]
            return {**state, "user": moved, "gradient": found["items"]}

        def client_final(items: jax.Array, state: Arrays) -> Arrays:
            return {"gradient": state["gradient"], "user": state["user"]}

        self._train = fedjax.for_each_client(client_init, client_step, client_final)
        longest = int(np.diff(workload.begin).max())
        largest = 1 << (longest - 1).bit_length()
        self._batches = fedjax.PaddedBatchHParams(largest, largest.bit_length())

    @property
    def users(self) -> Floats:
        return np.stack([np.asarray(user) for user in self._users])

    def prepare(self, number: int) -> None:
        work = self._workload
        triples = {
            "positive": work.positive.astype(np.int32),
            "negative": work.negative[number].astype(np.int32),
            "weight": work.weight,
        }
        self._data = fedjax.InMemoryFederatedData(
            {
                device: {name: rows[work.part(device)] for name, rows in triples.items()}
                for device in range(work.devices)
            }
        )

    def round(self, number: int) -> None:
        clients = (
            (
                device,
                data.padded_batch(self._batches),
                {"user": self._users[device], "rate": self._workload.user_rates[device]},
            )
            for device, data in self._data.clients()
        )
        total = fedjax.tree_util.tree_sum(self._gradients(clients))
        self.items = self._workload.server_step(self.items, np.asarray(total))
        jax.block_until_ready(self._users)

    def _gradients(self, clients):  # type: ignore[no-untyped-def]
        for device, found in self._train(jnp.asarray(self.items), clients):
            self._users[device] = found["user"]
            yield found["gradient"]


if __name__ == "__main__":
    take_turns(("fedjax", "jax", "jaxlib", "numpy"), FedJaxRounds)
