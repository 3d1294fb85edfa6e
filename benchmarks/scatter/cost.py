"""What a round costs a device in bytes, and the train graph that the suite's devices share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.methods.scatter import ScatterMethod, initial_items
from benchmarks.channels import WIRE_CODECS
from benchmarks.scatter.experiment import Experiment
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.scatter.factor_step import FactorStep, TrainerStep
from device_sdk.trainer import Trainer
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.manifest import RoundManifest, seal_chunks
from device_sdk.wire.publish.task_messages import TaskTerms, write_broadcast
from device_sdk.wire.seal.broadcast import Publication, new_group_key


def open_step(artifact: Path | None) -> FactorStep:
    """The train graph on one CPU thread: of ``artifact``, or of the one that is installed."""
    folder = artifact if artifact is not None else packaged_artifact()
    return TrainerStep(Trainer(folder, providers="cpu", threads=1))


_ITEMS = {"ml-100k": 1682, "ml-1m": 3706}
_TASK, _COHORT = "movies", "all"
_TRAIN_SECONDS = 60.0
_ID = bytes(32)


def published_bytes(experiment: Experiment) -> int:
    """Bytes of the MQTT payloads of the first round's broadcast: its chunks and its manifest.

    No run is needed: the size follows from the matrix's shape and codec (later rounds' rates may
    take a few bytes more or less). 0 for ``direct``, which encodes nothing. Raises KeyError for a
    data set without a known catalogue.
    """
    if experiment.codec == "direct":
        return 0
    rng = np.random.default_rng(0)
    first = initial_items(_ITEMS[experiment.data], experiment.width, experiment.spread, rng)
    broadcast = ScatterMethod(first, experiment.settings).open_round(1)
    terms = TaskTerms("scatter", WIRE_CODECS[experiment.codec], _TRAIN_SECONDS)
    plaintext = write_broadcast(broadcast, terms, experiment.broadcast_codec, rng)
    publication = Publication(new_group_key(1, rng.bytes), _TASK, _COHORT, rng.bytes)
    chunks, digests = seal_chunks(publication, plaintext)
    manifest = RoundManifest(
        root_fingerprint=bytes(16),
        task=_TASK,
        cohort=_COHORT,
        generation=1_700_000_000,
        round=1,
        version=0,
        artifact_id=_ID,
        catalogue_id=_ID,
        broadcast_id=publication.broadcast_id,
        key_epoch=1,
        sampling_seed=_ID,
        threshold=2**63,
        deadline_unix_seconds=1_700_000_300,
        opened_unix_seconds=1_700_000_000,
        codec=experiment.broadcast_codec,
        length=len(plaintext),
        chunks=digests,
    )
    signing = Ed25519PrivateKey.from_private_bytes(rng.bytes(32))
    sealed = publication.seal_manifest(encode(manifest), signing)
    return sum(map(len, chunks)) + len(sealed)
