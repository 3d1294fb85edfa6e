"""codecs.json says what the code does, and the code reads what codecs.json says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from device_sdk.wire.arrays.exchange import decode_update
from device_sdk.wire.arrays.factored import decode_factored
from device_sdk.wire.arrays.sparse import decode_ids, decode_sparse
from device_sdk.wire.arrays.tensors import decode_tensors
from device_sdk.wire.codec.message import decode
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.receipts import Receipt, Verdict, read_update, update_digest
from device_sdk.wire.publish.topics import Topics
from tests.vectors import generate_codecs as vectors

FILE = json.loads(vectors.FILE.read_text(encoding="utf-8"))
DOCS = Path(__file__).parents[4] / "docs"


def test_the_file_is_what_the_generator_writes() -> None:
    assert vectors.FILE.read_text(encoding="utf-8") == vectors.text()


def test_arrays_decode_to_the_values_written_beside_them() -> None:
    for entry in FILE["ids"]:
        data = bytes.fromhex(entry["encoding"])
        ids, end = decode_ids(data, 0, len(entry["ids"]), 2**31)
        assert (ids.tolist(), end) == (entry["ids"], len(data))
    sparse = FILE["sparse"]
    for encoding in sparse["encodings"].values():
        read = decode_sparse(bytes.fromhex(encoding), items=sparse["items"], width=sparse["width"])
        assert read.columns.tolist() == sparse["columns"]
        assert read.rows.tolist() == sparse["rows"]
        assert read.values.tolist() == sparse["values"]
    for factored in FILE["factored"].values():
        for encoding in factored["encodings"].values():
            found = decode_factored(
                bytes.fromhex(encoding), items=factored["items"], width=factored["width"]
            )
            assert (found.users, found.k) == (factored["users"], factored["k"])
            for name in ("rows", "pulls", "factor", "counts"):
                assert getattr(found, name).tolist() == factored[name]
    for section in (FILE["tensors"], FILE["tensors_int4"]):
        for encoding in section["encodings"].values():
            arrays = decode_tensors(bytes.fromhex(encoding))
            for name, expected in section["arrays"].items():
                assert arrays[name].dtype == np.dtype(expected["dtype"])
                assert arrays[name].tolist() == expected["values"]
    for encoding in FILE["named_update"]["encodings"].values():
        update = decode_update(bytes.fromhex(encoding), 4)
        assert dict(update.metadata) == FILE["named_update"]["metadata"]
        for name, expected in FILE["tensors"]["arrays"].items():
            assert update.tensors[name].tolist() == expected["values"]


def test_messages_decode_to_what_is_written_beside_them() -> None:
    recorded = FILE["update"]
    update = read_update(bytes.fromhex(recorded["payload"]), bytes.fromhex(recorded["device_id"]))
    assert update.identity == vectors.IDENTITY
    assert update.body.hex() == recorded["body"]
    assert update_digest(update.identity, update.body_sha256).hex() == recorded["digest"]
    for verdict, payload in FILE["receipts"]["payloads"].items():
        receipt = decode(Receipt, bytes.fromhex(payload))
        assert receipt.verdict is Verdict(verdict)
        assert receipt.digest.hex() == recorded["digest"]
    assert decode(RoundManifest, bytes.fromhex(FILE["manifest"]["body"])) == vectors.MANIFEST
    topics = Topics("site-1/tessera")
    for kind, written in FILE["topics"].items():
        assert type(topics.parse(written)).__name__ == kind


def test_every_hexadecimal_string_of_the_document_is_a_vector() -> None:
    known = vectors.FILE.read_text(encoding="utf-8")
    pages = [DOCS / "wire-tensors.md", *DOCS.glob("wire-tensors/*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    quoted = re.findall(r"`((?:[0-9a-f]{2} ?){5,})`", text)
    assert quoted
    for hexadecimal in quoted:
        assert f'"{hexadecimal.replace(" ", "")}"' in known, hexadecimal
