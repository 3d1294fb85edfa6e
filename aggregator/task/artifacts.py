"""A task's artifacts, checked and packed for sending."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from aggregator.errors import AggregatorError
from device_sdk.artifact import (
    INITIAL_FILE,
    MANIFEST_FILE,
    Artifact,
    ArtifactError,
    FileEntry,
    load_artifact,
    safetensors,
)
from device_sdk.artifact.submodels import FULL_FILE
from device_sdk.wire.publish.content import MOST_CONTENT_BYTES, pack_artifact
from device_sdk.wire.publish.task_messages import OfferedArtifact, OfferedShare, TaskTerms

if TYPE_CHECKING:
    from aggregator.task.file import Task
    from device_sdk.rehearsal import Rehearsed

_MORE_SECONDS = 2.0


@dataclass(frozen=True)
class ArtifactContent:
    """An artifact as it travels, and as a method reads its first parameters.

    ``companion``: the artifact that goes with it, if any. ``shared``: the file that it shares with
    others, of which they hold one copy.
    """

    artifact_id: bytes
    content: bytes
    artifact: Artifact
    companion: ArtifactContent | None = None
    shared: bytes | None = None

    def offer(self) -> OfferedArtifact:
        return OfferedArtifact(
            self.artifact_id,
            self.artifact.manifest.name,
            len(self.content),
            None if self.companion is None else self.companion.offer(),
            None if self.shared is None else OfferedShare(self.shared_id, len(self.shared)),
        )

    @property
    def shared_id(self) -> bytes:
        """SHA-256 of what is shared; empty where nothing is."""
        entry = self.artifact.manifest.shared
        return b"" if entry is None else bytes.fromhex(entry.sha256)


def read_artifacts(task: Task) -> tuple[ArtifactContent, ...]:
    """A task's artifacts, each with its companion if there are any. Raises AggregatorError.

    A rung of a ladder is an artifact by itself, with first values of its own, where it is the only
    one, or the method shares no model of which it could be a part.
    """
    shared: dict[str, bytes] = {}
    alone = not task.binding.one_model or len(task.artifacts) == 1
    no: list[ArtifactContent | None] = [None] * len(task.artifacts)
    companions = [*map(read_artifact, task.companions)] or no
    found: dict[bytes, ArtifactContent] = {}
    for folder, companion in zip(task.artifacts, companions, strict=True):
        content = read_artifact(folder, companion, shared, alone)
        if content.artifact_id in found:
            same = task.artifacts[[*found].index(content.artifact_id)]
            raise AggregatorError(
                f"the artifacts {same} and {folder} are the same: list it once (a ladder's folder "
                "is all of its rungs)"
            )
        found[content.artifact_id] = content
    parts = [each.artifact.manifest.submodel for each in found.values()]
    ladder = [each for each in parts if each is not None]
    if task.round.late == "staleness" and (why := task.binding.why_no_staleness(ladder)):
        raise AggregatorError(f"{task.path}: round.late is 'staleness', and {why}")
    return tuple(found.values())


def terms_of(task: Task, artifacts: tuple[ArtifactContent, ...]) -> TaskTerms:
    """What devices are told of the task."""
    return TaskTerms(
        task.binding.method_name,
        task.update_codec,
        task.round.train_seconds,
        tuple(each.offer() for each in artifacts),
        evaluation=None if task.evaluation is None else task.evaluation.terms,
    )


def read_artifact(
    folder: Path,
    companion: ArtifactContent | None = None,
    shared: MutableMapping[str, bytes] | None = None,
    alone: bool = False,
) -> ArtifactContent:
    """Check an artifact as a device would, and pack it; ``shared`` as of ``load_artifact``,
    ``alone``: as an artifact by itself. Raises AggregatorError."""
    known = {} if shared is None else shared
    try:
        artifact = load_artifact(folder, known)
        names = [MANIFEST_FILE, *artifact.manifest.files]
        files = {name: (folder / name).read_bytes() for name in names}
        if artifact.manifest.submodel is not None:
            if not (folder.resolve().parent / FULL_FILE).is_file():
                raise ArtifactError(
                    f"it is a part of a model, and {FULL_FILE} with that model's first values is "
                    "not beside it: keep the ladder's folder as export.submodels wrote it"
                )
            if alone:
                artifact = _by_itself(artifact, files)
        content = pack_artifact(files)
    except (ArtifactError, OSError, ValueError) as error:
        raise AggregatorError(f"the artifact {folder} cannot be published: {error}") from None
    artifact_id = hashlib.sha256(files[MANIFEST_FILE]).digest()
    beside = known.get(artifact.manifest.shared_file)
    if beside is not None and len(beside) > MOST_CONTENT_BYTES:
        raise AggregatorError(
            f"the artifact {folder} cannot be published: its frozen values are {len(beside):,} "
            f"bytes, above the {MOST_CONTENT_BYTES:,} of a content"
        )
    return ArtifactContent(artifact_id, content, artifact, companion, beside)


def _by_itself(artifact: Artifact, files: dict[str, bytes]) -> Artifact:
    """A rung with all of its first values, in ``files`` too, and no part of anything."""
    before, known = artifact.manifest, safetensors.decode(files[INITIAL_FILE]).tensors
    own = {n: a for n, a in artifact.initial.items() if n in known or n in before.given}
    files[INITIAL_FILE] = safetensors.encode(own)
    entries = {**before.files, INITIAL_FILE: FileEntry.of(files[INITIAL_FILE])}
    manifest = replace(before, submodel=None, files=entries)
    files[MANIFEST_FILE] = manifest.to_json()
    return replace(artifact, manifest=manifest)


def rehearsed(task: Task, seconds: float, data: str = "") -> list[Rehearsed]:
    """Train each of a task's artifacts, or its catalogue's items, for a few rounds with what
    devices will bring, in a process of its own: what would fail, before the first round.

    ``seconds``: for each kind of device. ``data``: ``module:function`` or ``file.py:function``, as
    of ``simulate``; else data are made up. Empty where there is no onnxruntime.
    """
    from device_sdk.rehearsal import supervise
    from device_sdk.trial import TrialLimits

    found = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "task.toml"
        text.write_text(task.text, encoding="utf-8")
        for place in range(1 if task.binding.needs_catalogue else len(task.artifacts)):
            arguments = [str(text), str(task.path.resolve()), str(place), data]
            limits = TrialLimits(seconds)
            each = supervise("aggregator.simulate.rehearsal", arguments, limits, Path(folder))
            found += [] if each is None else [each]
    return found


def require_harmless(folders: Iterable[Path], seconds: float) -> None:
    """Run each artifact for the first time, in a process of its own: its graphs, on a batch of its
    example's sizes, each opening and each run within so many seconds; then further steps for two
    seconds, 1,000 at most, for what does harm only later.

    Raises AggregatorError for one that does not come back, crashes or takes all memory. Where there
    is no onnxruntime nothing is run, as on the devices it is.
    """
    from device_sdk.trial import TrialLimits, try_artifact

    for folder in folders:
        result = try_artifact(folder, TrialLimits(seconds, more_seconds=_MORE_SECONDS))
        if result is not None and not result.certain:
            raise AggregatorError(
                f"nothing is known of the artifact {folder}: {result.detail}. Check it again"
            )
        if result is not None and result.reason is not None:
            raise AggregatorError(
                f"the artifact {folder} would do harm on devices ({result.reason.value}): "
                f"{result.detail}. Each of them would end it and report the same; export it again"
            )
