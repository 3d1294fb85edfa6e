"""The matrix factorisation artifact: where it lies and what its train step takes."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact import MANIFEST_FILE
from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.manifest import Manifest
from device_sdk.fields import Declared, Within
from device_sdk.interactions import Interactions
from device_sdk.methods.scatter.triples import PoolSettings, TripleSource, seen_by_anyone
from device_sdk.recommend import top_items

if TYPE_CHECKING:
    from device_sdk.runtime.providers import Providers
    from device_sdk.trainer import Trainer

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]

USERS = "users.weight"
ITEMS = "items.weight"
_ENTRIES = frozenset(
    {"user", "positive", "negative", "weight", "offset"}
    | {"rate_users", "rate_items", "l2_users", "l2_items"}
)


def packaged_artifact() -> Path:
    """The folder of the artifact that is installed with the device. Raises ArtifactError."""
    folder = Path(str(importlib.resources.files("device_sdk"))) / "artifacts" / "mf"
    if not folder.is_dir():
        raise ArtifactError(
            f"this installation has no {folder}: make the artifact with "
            "`tessera-export mf -o DIR` and pass DIR with --artifact"
        )
    return folder


def packaged_artifacts() -> list[Path]:
    """The folders of all that are installed: the factorisation first, then the demo's rungs."""
    first = packaged_artifact()
    return [first, *sorted(each.parent for each in first.parent.glob(f"*/*/{MANIFEST_FILE}"))]


def check_factorisation(manifest: Manifest) -> None:
    """Raises ArtifactError for an artifact that is not a matrix factorisation."""
    parameters = {
        member.name: member.shape
        for tensor in manifest.state
        if tensor.kind == "parameter"
        for member in tensor.members
    }
    entries = {port.of for port in manifest.graphs["train"].select("batch")}
    expected = {USERS: ("users", "k"), ITEMS: ("items", "k")}
    if parameters != expected or entries != _ENTRIES:
        raise ArtifactError(
            f"artifact {manifest.name!r} is no matrix factorisation: expected the parameters "
            f"{USERS} [users, k] and {ITEMS} [items, k] and the batch entries "
            f"{', '.join(sorted(_ENTRIES))}, as `tessera-export mf` makes them"
        )


def triple_batch(
    user: Rows,
    positive: Rows,
    negative: Rows,
    rates: tuple[float, float],
    l2: tuple[float, float] = (0.0, 0.0),
) -> dict[str, NDArray[np.generic]]:
    """One train step's batch: all triples weigh 1, no score is added.

    `user`, `positive`, `negative` are int64 [triples]; `rates`, of users and of items, multiply
    the summed gradient of each matrix; `l2`, likewise, applies per triple.
    """
    count = len(user)
    (rate_users, rate_items), (l2_users, l2_items) = rates, l2
    return {
        "user": user,
        "positive": positive,
        "negative": negative,
        "weight": np.ones(count, np.float32),
        "offset": np.zeros(count, np.float32),
        "rate_users": np.asarray(rate_users, np.float32),
        "rate_items": np.asarray(rate_items, np.float32),
        "l2_users": np.asarray(l2_users, np.float32),
        "l2_items": np.asarray(l2_items, np.float32),
    }


# Matrix factorisation learnt on this device alone, from its own interactions.

_SCALE = 0.1


@dataclass(frozen=True)
class LocalSettings(Declared):
    """`lr` multiplies a batch's summed gradient; `l2` applies to each triple's three vectors."""

    k: Annotated[int, Within(1)]
    lr: Annotated[float, Within(0, above=True)] = 0.05
    l2: Annotated[float, Within(0)] = 0.01
    batch: Annotated[int, Within(1)] = 512


class LocalFactorisation:
    """BPR (Rendle et al. 2009) by stochastic gradient descent on the artifact's train step.

    Factors start at random from `rng`, which also draws each epoch's triples. Raises ArtifactError
    for an artifact that is no matrix factorisation.
    """

    def __init__(
        self,
        artifact: str | os.PathLike[str],
        interactions: Interactions,
        settings: LocalSettings,
        *,
        rng: np.random.Generator,
        providers: Providers = "auto",
        threads: int = 1,
    ) -> None:
        from device_sdk.trainer import Trainer  # devices load this module without onnxruntime

        self.trainer: Trainer = Trainer(artifact, providers=providers, threads=threads)
        check_factorisation(self.trainer.artifact)
        self._interactions = interactions
        positives = [interactions.items_of(user) for user in range(len(interactions.user_ids))]
        # Only the training set counts as seen: items held out for a test are drawn like any other,
        # since leaving them out would tell the model which ones they are.
        self._triples = TripleSource(
            positives,
            np.empty(0, np.int64),
            seen_by_anyone(positives, len(interactions.item_ids)),
            PoolSettings(pseudo_per_positive=0.0),
        )
        self._settings = settings
        self._rng = rng
        self.trainer.set_parameters(
            {
                USERS: self._random(len(interactions.user_ids)),
                ITEMS: self._random(len(interactions.item_ids)),
            }
        )

    def epochs(self, count: int) -> Iterator[float]:
        """Train for `count` epochs; yields each one's mean loss per triple.

        Raises NonFiniteStep where the learning rate is too high.
        """
        for _ in range(count):
            triples = self._triples.draw(0, self._rng)
            order = self._rng.permutation(len(triples))
            total = 0.0
            for start in range(0, len(order), self._settings.batch):
                part = order[start : start + self._settings.batch]
                total += self.trainer.step(
                    triple_batch(
                        triples.user[part],
                        triples.positive[part],
                        triples.negative[part],
                        (self._settings.lr, self._settings.lr),
                        (self._settings.l2, self._settings.l2),
                    ),
                    hyper={"lr": 1.0},
                )
            yield total / max(1, len(triples))

    def recommend(self, user: int, count: int) -> list[tuple[int, float]]:
        """The best unseen items of a user (by row), as (item row, score)."""
        parameters = self.trainer.parameters
        scores = parameters[ITEMS] @ parameters[USERS][user]
        return top_items(scores, self._interactions.items_of(user), count)

    def _random(self, rows: int) -> Floats:
        shape = (rows, self._settings.k)
        return self._rng.standard_normal(shape, dtype=np.float32) * np.float32(_SCALE)
