"""Scatter's contract: the training settings of a broadcast, and the body of an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from device_sdk.fields import Within
from device_sdk.wire.arrays.exchange import Scalar, TrainingSettings, Update
from device_sdk.wire.arrays.factored import (
    FactoredRows,
    decode_factored,
    decode_factored_each,
    encode_factored,
    is_factored,
)
from device_sdk.wire.arrays.sparse import (
    SparseRows,
    decode_sparse,
    decode_sparse_each,
    encode_sparse,
)
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.task_messages import UPDATE_CODECS

# The training settings that a scatter broadcast carries, known to both ends.

LossName = Literal["least-squares", "bpr"]
Scores = Literal["residual", "columns"]
_LOSS = "loss"


class LossTraining(TrainingSettings):
    """Training settings of one loss, which a broadcast names."""

    __slots__ = ()
    LOSS: ClassVar[LossName]

    def as_scalars(self) -> dict[str, Scalar]:
        """The settings as a broadcast carries them, with the loss's name."""
        return {**super().as_scalars(), _LOSS: self.LOSS}

    @classmethod
    def from_scalars(
        cls, values: Mapping[str, Scalar], error: Callable[[str], Exception] = ValueError
    ) -> Self:
        """See :class:`TrainingSettings`. Raises ``error`` for a broadcast of another loss too."""
        if values.get(_LOSS) != cls.LOSS:
            raise error(f"the broadcast's loss is {values.get(_LOSS)!r}; expected {cls.LOSS!r}")
        return super().from_scalars(values, error)


@dataclass(frozen=True, slots=True)
class LeastSquaresTraining(LossTraining):
    """How every device trains in a round of implicit least squares: what its model says is all."""

    LOSS = "least-squares"


@dataclass(frozen=True, slots=True)
class BprTraining(LossTraining):
    """How every device trains in a round of Bayesian personalised ranking.

    Attributes:
        scores: ``columns`` scores a triple by the drawn columns alone (the patent's); ``residual``
            adds the score of the left-out columns as a constant, so that every device descends the
            same full objective on its own block of coordinates.
        user_learning_rate: a local user's vector moves by this rate times its gradient, summed
            over its triples and divided by the square root of their total weight.
        user_l2: weight of half the users' squared norms in the loss, once per triple.
        item_l2: likewise of the items'.
        user_spread: standard deviation of a new user's vector.
        most_triples: at most so many triples a device and round, drawn at random; 0 for all.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    LOSS = "bpr"

    scores: Scores = "residual"
    user_learning_rate: Annotated[float, Within(0, 1e3, above=True)] = 0.7
    user_l2: Annotated[float, Within(0, 1e3)] = 0.01
    item_l2: Annotated[float, Within(0, 1e3)] = 0.001
    user_spread: Annotated[float, Within(0, 10, above=True)] = 0.01
    most_triples: Annotated[int, Within(0)] = 0


STRENGTHS, SOLVE = "strengths", "solve"
"""A least-squares broadcast's tensors beside ``items``: of V = X S, with X the ``items`` of the
broadcast and X'X / |I| = 1, the diagonal of S, float16 [K], not rising; and a0 and lambda, float16
[2]. As float16 they travel as they are."""


def loss_of(settings: Mapping[str, Scalar]) -> str:
    """The loss that a broadcast's settings name; "" where they name none."""
    return str(settings.get(_LOSS, ""))


# A scatter update, between the learner's named arrays and the bytes of an update's body.
#
# Of BPR: ``columns`` int64 [k], ``rows`` int64 [r] and ``values`` float32 [r, k], the gradient. Of
# least squares, whose gradient [r, K] and Gram matrix [K, K] are products of the same factor:
# ``rows``, ``pulls`` float32 [r, f] and ``factor`` float32 [f, K]; ``counts`` int64 [r], by row the
# local users that have the item; ``users`` int64 [], those that have any; and ``k`` int64 [], the
# columns that the device trained.

BPR_TENSORS = frozenset(("columns", "rows", "values"))
LEAST_SQUARES_TENSORS = frozenset(("rows", "pulls", "factor", "counts", "users", "k"))


def encode_scatter_update(
    update: Update, width: int, update_codec: str, rng: np.random.Generator | None = None
) -> bytes:
    """The body of ``update``, with the tensors of either loss.

    ``width``: the task's K, the second dimension of the broadcast's ``items``. ``rng`` is needed
    for ``int8`` only. Raises ValueError for arrays that do not fit.
    """
    tensors, codec = update.tensors, UPDATE_CODECS[update_codec]
    if "factor" in tensors:
        factored = FactoredRows(
            tensors["rows"], tensors["pulls"], tensors["factor"], tensors["counts"],
            int(tensors["users"]), int(tensors["k"]), width,
        )  # fmt: skip
        return encode_factored(factored, codec, rng)
    sparse = SparseRows(tensors["columns"], tensors["rows"], tensors["values"], width)
    return encode_sparse(sparse, codec, rng)


def decode_scatter_update(
    body: bytes, round_id: int, items: int, width: int, sender: str = ""
) -> Update:
    """The update in ``body`` of ``sender`` for an item matrix [items, width]. A ``width`` of 0
    stands for the one that the body of a least-squares update names. Raises ``WireError``."""
    decode = decode_factored if is_factored(body) else decode_sparse
    return _update(decode(body, items=items, width=width), round_id, sender)


def decode_scatter_updates(
    bodies: Sequence[tuple[bytes, str]], round_id: int, items: int, width: int
) -> list[Update | WireError]:
    """The updates in many bodies, each with its sender; an error in the place of a bad one."""
    read: dict[int, SparseRows | FactoredRows | WireError] = {}
    places = [place for place, (body, _) in enumerate(bodies) if is_factored(body)]
    some = [bodies[place][0] for place in places]
    read.update(zip(places, decode_factored_each(some, items=items, width=width), strict=True))
    places = [place for place in range(len(bodies)) if place not in read]
    some = [bodies[place][0] for place in places]
    read.update(zip(places, decode_sparse_each(some, items=items, width=width), strict=True))
    return [
        found if isinstance(found := read[place], WireError) else _update(found, round_id, sender)
        for place, (_, sender) in enumerate(bodies)
    ]


def _update(found: SparseRows | FactoredRows, round_id: int, sender: str) -> Update:
    tensors: dict[str, NDArray[Any]]
    if isinstance(found, SparseRows):
        tensors = {"columns": found.columns, "rows": found.rows, "values": found.values}
    else:
        tensors = {
            "rows": found.rows,
            "pulls": found.pulls,
            "factor": found.factor,
            "counts": found.counts,
            "users": np.asarray(found.users, dtype=np.int64),
            "k": np.asarray(found.k, dtype=np.int64),
        }
    return Update(round_id=round_id, tensors=tensors, sender=sender)
