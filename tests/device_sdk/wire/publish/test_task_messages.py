"""Broadcasts, contents, catalogues and artifact bundles: round trips, and bad bytes refused."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.artifact import MANIFEST_FILE
from device_sdk.evaluation.report import EvaluationTerms
from device_sdk.methods.scatter.contract import decode_scatter_update, encode_scatter_update
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import decode, encode
from device_sdk.wire.publish.catalogue import Catalogue, catalogue_id
from device_sdk.wire.publish.content import (
    ContentHead,
    ContentKind,
    pack_artifact,
    seal_content,
    unpack_artifact,
)
from device_sdk.wire.publish.manifest import (
    CHUNK_BYTES,
    ChunkSet,
    RoundManifest,
    seal_chunks,
)
from device_sdk.wire.publish.task_messages import (
    BROADCAST_CODECS,
    OfferedArtifact,
    OfferedAttachment,
    OfferedContent,
    OfferedShare,
    TaskTerms,
    read_attachment,
    read_broadcast,
    write_attachment,
    write_broadcast,
)
from device_sdk.wire.seal.broadcast import (
    WRAPPED_BYTES,
    Publication,
    derive_broadcast_keys,
    new_group_key,
    open_manifest,
    read_manifest_label,
)
from tests.fakes.parties import SeededBytes, key_from
from tests.fakes.scatter_updates import of_gradient

MF = Path(__file__).parents[4] / "device_sdk" / "artifacts" / "mf"
TERMS = TaskTerms(
    "scatter",
    "int8",
    12.5,
    (
        OfferedArtifact(b"\xa1" * 32, "small net", 900),
        OfferedArtifact(b"\xa2" * 32, "net", 5000, OfferedContent(b"\xa3" * 32, "meta", 7)),
        OfferedArtifact(b"\xa4" * 32, "rung", 900, None, OfferedShare(b"\xa5" * 32, 70_000)),
    ),
    (
        OfferedAttachment("public.ab", b"\xc1" * 32, 77),
        OfferedAttachment("vector.ab", b"\xc2" * 32, 78, "near"),
    ),
    {"near": (b"\x11" * WRAPPED_BYTES, b"\x22" * WRAPPED_BYTES)},
)
KEY = new_group_key(3, SeededBytes("group"))


def manifest(codec: str = "float32") -> RoundManifest:
    zeros = bytes(32)
    return RoundManifest(
        bytes(16), "films", "all", 9, 4, 2, zeros, zeros, zeros, 3, zeros, 1, 5, 6, codec, 0, ()
    )


def broadcast() -> Broadcast:
    items = np.random.default_rng(1).standard_normal((7, 4), dtype=np.float32)
    settings = {"scores": "residual", "rate": 0.5, "most": 3, "on": True}
    return Broadcast(4, 2, {"items": items}, settings)


@pytest.mark.parametrize("codec", sorted(BROADCAST_CODECS))
def test_broadcasts_come_back(codec: str) -> None:
    sent = broadcast()
    plaintext = write_broadcast(sent, TERMS, codec, np.random.default_rng(2))
    terms, got = read_broadcast(plaintext, manifest(codec))
    assert terms == TERMS
    assert (got.round_id, got.version, dict(got.settings)) == (4, 2, dict(sent.settings))
    step = {"float32": 0.0, "float16": 2e-3, "int8": 0.05, "int4": 0.5}[codec]
    np.testing.assert_allclose(got.tensors["items"], sent.tensors["items"], atol=step)


@pytest.mark.parametrize("settings", [{}, {"rate": 0.5}])
def test_what_devices_of_the_first_release_do_not_know_travels_where_they_leave_it(
    settings: dict[str, float],
) -> None:
    asked = EvaluationTerms(("loss",), share=0.5, control=0.25)
    sent = replace(TERMS, evaluation=asked, predicts="global")
    plaintext = write_broadcast(replace(broadcast(), settings=settings), sent, "float32")
    head = cbor.decode(plaintext[4 : 4 + int.from_bytes(plaintext[:4], "little")], limit_bytes=4096)
    assert isinstance(head, dict) and head.keys() == {"terms", "settings"}
    known = {"artifacts", "attachments", "cohort_keys", "evaluation", "method", "train_seconds"}
    assert head["terms"].keys() <= known | {"update_codec"}
    assert head["terms"]["evaluation"] == {"metrics": ["loss"], "share": 0.5}
    assert head["settings"] == {**settings, "terms.predicts": "global", "terms.control": 0.25}
    terms, got = read_broadcast(plaintext, manifest())
    assert terms == sent and got.settings == settings


@pytest.mark.parametrize("said", [{"terms.predicts": "both"}, {"terms.predicts": 1}])
def test_what_travels_among_the_settings_is_read_as_strictly(said: dict[str, Any]) -> None:
    plaintext = write_broadcast(replace(broadcast(), settings=said), TERMS, "float32")
    with pytest.raises(WireError, match=r"terms\.predicts"):
        read_broadcast(plaintext, manifest())


@given(st.data())
def test_damaged_broadcasts_are_refused_or_read(data: st.DataObject) -> None:
    plaintext = bytearray(write_broadcast(broadcast(), TERMS, "float32"))
    for _ in range(data.draw(st.integers(1, 4))):
        plaintext[data.draw(st.integers(0, len(plaintext) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(plaintext)))
    for damaged in (bytes(plaintext), bytes(plaintext[:cut])):
        with suppress(WireError):
            read_broadcast(damaged, manifest())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("Scatter!", "int8", 1.0), "method"),
        (("scatter", "int4", 1.0), "update_codec"),
        (("scatter", "int8", 0.0), "train_seconds"),
    ],
)
def test_bad_terms_name_the_field(fields: tuple[str, str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskTerms(*fields)


ARTIFACT = OfferedArtifact(bytes(32), "net", 9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"artifacts": (ARTIFACT, ARTIFACT)}, "twice"),
        ({"attachments": TERMS.attachments[::-1]}, "rising name"),
        ({"cohort_keys": {}}, "cohort without a key"),
        ({"cohort_keys": {"near": (b"short",)}}, "56 bytes"),
        ({"cohort_keys": {**TERMS.cohort_keys, "Far": ()}}, "Far"),
    ],
)
def test_bad_offers_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TERMS, **changed)


def test_offers_state_ids_sizes_and_names() -> None:
    for bad in ((b"", "net", 9), (bytes(32), "", 9), (bytes(32), "net", 0)):
        with pytest.raises(ValueError):
            OfferedArtifact(*bad)
    paired = OfferedArtifact(bytes(32), "net", 9, ARTIFACT)
    assert paired.total_size == 18
    with pytest.raises(ValueError, match="companion"):
        replace(ARTIFACT, companion=paired)
    for attachment in (("Public", bytes(32), 9), ("a", b"", 9), ("a", bytes(32), 0)):
        with pytest.raises(ValueError):
            OfferedAttachment(*attachment)


@pytest.mark.parametrize("codec", sorted(BROADCAST_CODECS))
def test_attachments_come_back(codec: str) -> None:
    tensors = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.array([1, 2])}
    content = write_attachment(Attachment(tensors), codec, np.random.default_rng(1))
    got = read_attachment(content, "near")
    assert got.cohort == "near"
    step = 5 / 7 * 1.01 if codec == "int4" else 0.05
    np.testing.assert_allclose(got.tensors["x"], tensors["x"], atol=step)
    np.testing.assert_array_equal(got.tensors["y"], tensors["y"])
    with pytest.raises(WireError, match="bad-length"):
        read_attachment(content + b"\x00", "")


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_contents_come_back_from_chunks_in_any_order(size: int) -> None:
    content = SeededBytes("content")(size)
    content_id = hashlib.sha256(content).digest()
    publication = Publication(KEY, "films", "all", SeededBytes("publication"))
    signing = key_from("signing")
    head, *chunks = seal_content(publication, signing, ContentKind.CATALOGUE, content_id, content)
    label = read_manifest_label(head)
    keys = derive_broadcast_keys(KEY, label.broadcast_id, "films", "all")
    body = open_manifest(head, keys, signing.public_key())
    read = decode(ContentHead, body)
    assert (read.kind, read.content_id, read.length) == (ContentKind.CATALOGUE, content_id, size)
    with pytest.raises(WireError, match="wrong-fields"):
        decode(RoundManifest, body)  # a head cannot be taken for a round's manifest
    got = ChunkSet(keys, label.broadcast_id, read.chunks, read.length)
    for chunk in reversed(chunks):
        assert got.missing
        got.add(chunk)
        got.add(chunk)
    assert got.plaintext() == content


def test_chunks_of_another_publication_are_refused() -> None:
    publications = [Publication(KEY, "films", "all", SeededBytes(n)) for n in ("a", "b")]
    content = SeededBytes("content")(CHUNK_BYTES + 9)
    (first, digests), (second, _) = (seal_chunks(each, content) for each in publications)
    keys = derive_broadcast_keys(KEY, publications[0].broadcast_id, "films", "all")
    chunks = ChunkSet(keys, publications[0].broadcast_id, digests, len(content))
    with pytest.raises(WireError, match="wrong-chunk"):
        chunks.add(second[0])
    with pytest.raises(ValueError, match="missing"):
        chunks.plaintext()
    assert not chunks.add(first[1])
    assert chunks.add(first[0])
    wrong = ChunkSet(keys, publications[0].broadcast_id, digests, len(content) + 1)
    for message in first:
        wrong.add(message)
    with pytest.raises(WireError, match="wrong-length"):
        wrong.plaintext()


@given(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=20, unique=True))
def test_catalogues_come_back(items: list[str]) -> None:
    catalogue = Catalogue(tuple(items), tuple(item.upper() for item in items))
    content = encode(catalogue)
    again = decode(Catalogue, content)
    assert again == catalogue and len(catalogue_id(content)) == 32
    assert [again.rows[item] for item in items] == list(range(len(items)))
    longer = Catalogue((*items, "a new item"), ("",) * (len(items) + 1))
    assert longer.extends(catalogue) and not catalogue.extends(longer)


@pytest.mark.parametrize(
    ("items", "titles", "message"),
    [
        ((), (), "items is .0 items"),
        (("a", "a"), ("", ""), "row 1 repeats the item id of row 0"),
        (("a", ""), ("", ""), r"items\[1\]"),
        (("a",), (), "titles is .0 items"),
        (("a",), ("x" * 600,), r"titles\[0\]"),
    ],
)
def test_catalogues_that_cannot_be(
    items: tuple[str, ...], titles: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Catalogue(items, titles)
    with pytest.raises(WireError):
        decode(Catalogue, cbor.encode({"items": list(items), "titles": list(titles)}))


def test_artifacts_are_trusted_by_their_id_alone() -> None:
    files = {path.name: path.read_bytes() for path in MF.iterdir()}
    artifact_id = hashlib.sha256(files[MANIFEST_FILE]).digest()
    content = pack_artifact(files)
    assert unpack_artifact(content, artifact_id) == files
    with pytest.raises(WireError, match="wrong-content"):
        unpack_artifact(content, bytes(32))
    changed = {**files, "train.onnx": files["train.onnx"][:-1] + b"\x00"}
    more = {**files, "../evil": b""}
    for bad in (changed, more, {n: d for n, d in files.items() if n != "infer.onnx"}):
        with pytest.raises(WireError, match="wrong-content"):
            unpack_artifact(cbor.encode(dict(bad)), artifact_id)
        with pytest.raises(ValueError, match="wrong-content"):
            pack_artifact(bad)


@pytest.mark.parametrize("loss", ["bpr", "least-squares"])
def test_scatter_updates_come_back(loss: str) -> None:
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    tensors = {"columns": np.array([0, 5]), "rows": np.array([2, 3, 9]), "values": values}
    if loss == "least-squares":
        tensors = of_gradient([2, 3, 9], np.arange(24).reshape(3, 8))
    body = encode_scatter_update(Update(4, tensors), 8, "float32")
    got = decode_scatter_update(body, 4, 10, 8)
    assert got.round_id == 4
    for name, array in tensors.items():
        np.testing.assert_array_equal(got.tensors[name], array)
    with pytest.raises(WireError, match="bad-rows"):
        decode_scatter_update(body, 4, 9, 8)
