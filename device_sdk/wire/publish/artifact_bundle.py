"""An artifact as one content: canonical CBOR {file name: bytes}, the manifest among the files.

The artifact's id is the SHA-256 of its ``manifest.json``, which names the SHA-256 of every other
file: who knows the id can trust a bundle from anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from device_sdk.artifact import MANIFEST_FILE, ArtifactError, Manifest
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError

MAX_BUNDLE_BYTES = 128 << 20


def pack_artifact(files: Mapping[str, bytes]) -> bytes:
    """The content of an artifact's files. Raises ValueError unless they are one artifact's."""
    if MANIFEST_FILE not in files:
        raise ValueError(f"the files lack {MANIFEST_FILE}")
    try:
        content = cbor.encode(dict(files))
        unpack_artifact(content, hashlib.sha256(files[MANIFEST_FILE]).digest())
    except WireError as error:
        raise ValueError(str(error)) from error
    return content


def unpack_artifact(content: bytes, artifact_id: bytes) -> dict[str, bytes]:
    """The files of the artifact ``artifact_id`` (32 bytes), each checked against its hash.

    Names are those the manifest lists, so none of them leaves a folder. Raises ``WireError``:
    ``wrong-content``, or a parser's reason.
    """
    value = cbor.decode(content, limit_bytes=MAX_BUNDLE_BYTES)
    if not isinstance(value, dict):
        raise WireError("wrong-fields", "expected a map of files")
    files = {name: data for name, data in value.items() if isinstance(data, bytes)}
    listed = files.get(MANIFEST_FILE)
    if listed is None or len(files) != len(value):
        raise WireError("wrong-fields", f"expected byte strings, {MANIFEST_FILE} among them")
    if hashlib.sha256(listed).digest() != artifact_id:
        raise WireError("wrong-content", "another artifact than the manifest names")
    try:
        manifest = Manifest.parse(listed)
    except ArtifactError as error:
        raise WireError("wrong-content", f"the artifact's manifest is broken: {error}") from error
    if set(files) != {MANIFEST_FILE, *manifest.files}:
        raise WireError("wrong-content", "the artifact's files are not those it lists")
    for name, entry in manifest.files.items():
        if len(files[name]) != entry.size:
            raise WireError("wrong-content", "a file's length is not the listed one")
        if hashlib.sha256(files[name]).hexdigest() != entry.sha256:
            raise WireError("wrong-content", "a file's hash is not the listed one")
    return files
