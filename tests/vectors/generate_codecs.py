"""Write codecs.json: test vectors for every layout of docs/wire-tensors.md.

    python tests/vectors/generate_codecs.py [--check]

``--check`` writes nothing and fails when the file would change. The encoder's stochastic rounding
draws from numpy's PCG64; the vectors of INT8 and INT4 use values that are whole multiples of their
scale, so that they come out the same with any generator.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.arrays.exchange import Update, encode_update
from device_sdk.wire.arrays.factored import FactoredRows, encode_factored
from device_sdk.wire.arrays.sparse import SparseRows, ValueFormat, encode_ids, encode_sparse
from device_sdk.wire.arrays.tensors import Codec, encode_tensors
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.chunks import PART_BYTES, split
from device_sdk.wire.publish.manifest import CHUNK_BYTES, RoundManifest, selected
from device_sdk.wire.publish.receipts import (
    Receipt,
    RecordType,
    UpdateIdentity,
    Verdict,
    leave_digest,
    update_digest,
    with_report,
    write_receipt,
    write_update,
)
from device_sdk.wire.publish.report import (
    Details,
    ItemCount,
    Reason,
    Report,
    ReportedOutcome,
)
from device_sdk.wire.publish.task_messages import Standing
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    DownTopic,
    EnrolAnswerTopic,
    EnrolRequestTopic,
    ManifestTopic,
    PresenceTopic,
    Topics,
    UpTopic,
)
from device_sdk.wire.seal.session import padded_length
from tests.vectors.written import write

_FACTORED_ARRAYS = ("rows", "pulls", "factor", "counts")
_WIDE = (Codec.FLOAT32, Codec.FLOAT16, Codec.INT8)
FILE = Path(__file__).with_name("codecs.json")
Section: TypeAlias = dict[str, Any]

IDENTITY = UpdateIdentity(bytes(range(16)), "films", 1_700_000_000, 4)
STANDING = Standing({"room": "é 3", "site": "north"}, (("air", "all"), ("films", "all")))
SPARSE = SparseRows(
    columns=np.array([0, 3, 9], dtype=np.int64),
    rows=np.array([2, 3, 700], dtype=np.int64),
    values=np.array([[127, -1, 0], [0, 0, 0], [-63.5, 0.5, 31.5]], dtype=np.float32),
    width=12,
)
FACTORED = {
    "one user": FactoredRows(
        rows=np.array([2, 700], dtype=np.int64),
        pulls=np.array([[-127], [1]], dtype=np.float32),
        factor=np.array([[127, -2, 0, 5]], dtype=np.float32),
        counts=np.array([1, 1], dtype=np.int64),
        users=1,
        k=2,
        width=4,
    ),
    "300 users": FactoredRows(
        rows=np.array([2, 3, 700], dtype=np.int64),
        pulls=np.array([[127, -63.5], [-1, 0.5], [0, 31.5]], dtype=np.float32),
        factor=np.array([[63.5, 0.5, 0, -31.5], [0, -127, 4, 1]], dtype=np.float32),
        counts=np.array([1, 300, 7], dtype=np.int64),
        users=300,
        k=4,
        width=4,
    ),
    "nobody": FactoredRows(
        rows=np.empty(0, dtype=np.int64),
        pulls=np.empty((0, 0), dtype=np.float32),
        factor=np.empty((0, 4), dtype=np.float32),
        counts=np.empty(0, dtype=np.int64),
        users=0,
        k=1,
        width=4,
    ),
}
TENSORS: dict[str, NDArray[Any]] = {
    "count": np.array([1, 2], dtype=np.int64),
    "items": np.array([[127, -2], [0, 0]], dtype=np.float32),
    "seen": np.array([True, False]),
}
NARROW: dict[str, NDArray[Any]] = {
    "count": np.array([1, 2], dtype=np.int64),
    "items": np.array([[7, -7, 1], [0, 0, 0], [-3.5, 0.5, 1]], dtype=np.float32),
}
"""Whole multiples of their scales in four bits, as ``TENSORS`` is in eight."""
METADATA = {"loss": 0.5, "samples": 40}
MANIFEST = RoundManifest(
    root_fingerprint=bytes(range(16)),
    task="films",
    cohort="all",
    generation=1_700_000_000,
    round=4,
    version=3,
    artifact_id=b"\xa1" * 32,
    catalogue_id=b"\xca" * 32,
    broadcast_id=b"\xbc" * 32,
    key_epoch=1,
    sampling_seed=b"\x5e" * 32,
    threshold=2**63,
    opened_unix_seconds=1_700_000_000,
    deadline_unix_seconds=1_700_000_100,
    codec="float16",
    length=CHUNK_BYTES + 1,
    chunks=(b"\x01" * 32, b"\x02" * 32),
)


REPORTS = {
    "trained": Report(
        ReportedOutcome.TRAINED,
        "",
        Details(
            "0.1.0",
            "1.22.0",
            "linux-aarch64",
            "k=8",
            1.5,
            40_960,
            {"site": "north"},
            ItemCount(6, 5),
        ),
        b"\xa0",
    ),
    "failed": Report(
        ReportedOutcome.FAILED, Reason.NOT_FINITE.value, Details("0.1.0", "", "linux-x86_64")
    ),
    "declined": Report(ReportedOutcome.DECLINED, Reason.NO_DATA.value),
}


def build() -> Section:
    """All vectors; bytes in hexadecimal."""
    rng = np.random.default_rng(0)
    body = encode_sparse(SPARSE, ValueFormat.INT8, rng)
    digest = update_digest(IDENTITY, hashlib.sha256(body).digest())
    id_lists = [[], [0], [127], [128], [0, 1, 2], [5, 133, 134], [2**31 - 1]]
    long_message = bytes(2 * PART_BYTES + 1)
    topics = Topics("site-1/tessera")
    handle, content = bytes(range(16)), bytes(range(32))
    sent_with = {"trained": body, "failed": b""}
    return {
        "ids": [
            {"ids": ids, "encoding": encode_ids(np.array(ids, dtype=np.int64)).hex()}
            for ids in id_lists
        ],
        "sparse": {
            "items": 1000,
            "width": SPARSE.width,
            "columns": SPARSE.columns.tolist(),
            "rows": SPARSE.rows.tolist(),
            "values": SPARSE.values.tolist(),
            "encodings": {
                each.name: encode_sparse(SPARSE, each, rng).hex() for each in ValueFormat
            },
        },
        "factored": {
            name: {
                "items": 1000,
                "width": each.width,
                "users": each.users,
                "k": each.k,
                **{field: getattr(each, field).tolist() for field in _FACTORED_ARRAYS},
                "encodings": {
                    form.name: encode_factored(each, form, rng).hex() for form in ValueFormat
                },
            }
            for name, each in FACTORED.items()
        },
        "tensors": {
            "arrays": _described(TENSORS),
            "encodings": {each.name: encode_tensors(TENSORS, each, rng).hex() for each in _WIDE},
        },
        "tensors_int4": {
            "arrays": _described(NARROW),
            "encodings": {"INT4": encode_tensors(NARROW, Codec.INT4, rng).hex()},
        },
        "named_update": {
            "metadata": METADATA,
            "encodings": {
                each.name: encode_update(Update(4, TENSORS, METADATA), each, rng).hex()
                for each in _WIDE
            },
        },
        "update": {
            "type": int(RecordType.UPDATE),
            "device_id": IDENTITY.device_id.hex(),
            "task": IDENTITY.task,
            "generation": IDENTITY.generation,
            "round": IDENTITY.round,
            "body": body.hex(),
            "payload": write_update(IDENTITY, body).hex(),
            "digest": digest.hex(),
        },
        "reports": {name: encode(each).hex() for name, each in REPORTS.items()},
        "contributions": {
            "type": int(RecordType.CONTRIBUTION),
            **{name: _contribution(REPORTS[name], sent) for name, sent in sent_with.items()},
        },
        "leave": {
            "type": int(RecordType.LEAVE),
            "payload": "",
            "digest": leave_digest(IDENTITY.device_id).hex(),
        },
        "receipts": {
            "type": int(RecordType.RECEIPT),
            "payloads": {
                verdict.value: write_receipt(
                    Receipt(digest, verdict, "bad-rows" if verdict is Verdict.REFUSED else "")
                ).hex()
                for verdict in Verdict
            },
        },
        "standing": {
            "type": int(RecordType.STANDING),
            "labels": STANDING.labels,
            "tasks": [list(each) for each in STANDING.tasks],
            "payload": encode(STANDING).hex(),
        },
        "manifest": {
            "body": encode(MANIFEST).hex(),
            "selected": [
                {"device_id": device.hex(), "selected": _selected(device)}
                for device in (bytes((number,)) * 16 for number in range(6))
            ],
        },
        "parts": [
            {
                "index": fragment.index,
                "total": fragment.total,
                "length": fragment.length,
                "bytes": len(part),
            }
            for fragment, part in split(long_message, bytes(8))
        ],
        "padding": {
            str(length): padded_length(length, 98_248)
            for length in (0, 127, 128, 143, 144, 1790, 10_000, 98_247)
        },
        "topics": {
            type(topic).__name__: topics.write(topic)
            for topic in (
                UpTopic(0, handle),
                DownTopic(handle),
                DescriptorTopic(),
                PresenceTopic(),
                ManifestTopic("films", "all"),
                ChunkTopic(content, 7),
                EnrolRequestTopic(),
                EnrolAnswerTopic(handle),
            )
        },
    }


def _contribution(report: Report, body: bytes) -> Section:
    content = with_report(encode(report), body)
    return {
        "body": body.hex(),
        "payload": write_update(IDENTITY, content).hex(),
        "digest": update_digest(IDENTITY, hashlib.sha256(content).digest()).hex(),
    }


def _described(arrays: dict[str, NDArray[Any]]) -> Section:
    return {
        name: {"dtype": array.dtype.name, "values": array.tolist()}
        for name, array in arrays.items()
    }


def text() -> str:
    """The file's content."""
    return json.dumps(build(), indent=1) + "\n"


def _selected(device_id: bytes) -> bool:
    return selected(
        MANIFEST.sampling_seed, MANIFEST.threshold, MANIFEST.task, MANIFEST.round, device_id
    )


if __name__ == "__main__":
    sys.exit(write(FILE, text()))
