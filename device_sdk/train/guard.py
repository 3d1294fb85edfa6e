"""Artifacts that do harm: each is tried before it runs here, watched while it runs, and kept out
once it did not come back or took the process with it.

What runs is what an operator published, and that may be wrong in ways that no check of its bytes
finds: a loop that does not end, a product of large constants, a node that crashes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from device_sdk.errors import CallEnded
from device_sdk.home.task_store import TriedArtifact
from device_sdk.methods.learner import Declined
from device_sdk.train.job import LocalArtifact, TrainingJob, reason_of
from device_sdk.trial import PASSED, TrialLimits
from device_sdk.wire.publish.report import Reason
from device_sdk.world import DeviceWorld

# On the example's batch, and on whatever batch the device has.
_TRIAL_SECONDS: Final = (10.0, 60.0)
_MORE_SECONDS: Final = 0.2  # most of what comes late in a small model comes within 1,000 steps
_LEAST_SECONDS: Final = 30.0
_IN_USE: Final = "in-use"
_ID_DIGITS: Final = 64


class ArtifactHeld(Declined):
    """No artifact of the task may run on this device for now."""


class ArtifactGuard:
    """Lets a job's artifacts run, one job at a time.

    ``now``: the aggregator's time, Unix seconds.

    While a job is worked on, the id of the artifact that runs (of all, until one does) is in a file
    of the home, with its companion's. It outlives the process and is not flushed: a power cut,
    which is no artifact's fault, mostly leaves none. So whoever dies of a rung that is too large
    for it goes on with smaller ones.
    """

    def __init__(self, world: DeviceWorld, now: Callable[[], int]) -> None:
        self._world, self._store, self._now = world, world.home.trials, now
        self._file: Path = world.home.folder / _IN_USE
        self._died = self._left_in_use()
        self._in_use: set[str] = set()
        self._untried: set[bytes] = set()
        """Of which no trial was to be had; not attempted again before the next start."""

    @contextmanager
    def using(self, job: TrainingJob) -> Iterator[TrainingJob]:
        """The job with those of its artifacts that may run, within the time that they have.

        Raises :class:`ArtifactHeld` where that is none of them, Declined where the home cannot be
        written, and CallEnded where the device was stopped meanwhile.
        """
        # One step cannot take more than what a whole training is given, on any machine.
        own, watch = self._world.options.most_step_seconds, self._world.watch
        seconds = max(_LEAST_SECONDS, job.terms.train_seconds) if own is None else own
        allowed, strange, known = self._begun(job)
        failure: Reason | None = None
        try:
            with watch.during(seconds):
                yield replace(job, artifacts=allowed)
        except Exception as error:
            failure = reason_of(error)
            raise
        finally:
            # Also where it was stopped: the process is alive.
            with contextlib.suppress(OSError):  # then it counts as a death, of which one is free
                self._file.unlink(missing_ok=True)
            guilty = [each for each in strange if each.hex() == watch.called] or strange
            if watch.ended == "too-long":
                detail = f"a step, or the opening of its graphs, did not end within {seconds:g} s"
                for each in guilty:
                    self._store.strike(each, Reason.STEP_TOO_LONG, detail, self._now())
            elif failure is Reason.OUT_OF_MEMORY:
                for each in guilty:
                    self._doubt(each, failure, "its training took more memory than there is here")
            elif not watch.ended and any(each.strikes for each in known):
                self._store.absolve(strange)

    def _begun(
        self, job: TrainingJob
    ) -> tuple[tuple[LocalArtifact, ...], list[bytes], list[TriedArtifact]]:
        """As :meth:`_admitted`; what is said to be in use is so from now on."""
        if self._died:
            self._note_deaths()
        found = self._admitted(job)
        self._world.watch.begins = partial(self._runs, [self._strange(each) for each in found[0]])
        if found[1]:
            try:
                self._say_in_use(found[1])
            except OSError as error:
                why = f"this device's home cannot be written, so nothing is trained: {error}"
                raise Declined(why, Reason.DISK) from error
        return found

    def _say_in_use(self, ids: Sequence[bytes]) -> None:
        self._in_use = {each.hex() for each in ids}
        # In one step: a process that dies in between leaves what was said before.
        whole = self._file.with_name(f"{_IN_USE}.new")
        whole.write_text("\n".join(self._in_use), encoding="ascii")
        whole.replace(self._file)

    def _runs(self, artifacts: Sequence[Sequence[bytes]], called: str) -> None:
        """A call of one of the ``artifacts``, each with its companion, begins."""
        own = next((ids for ids in artifacts if called in [each.hex() for each in ids]), None)
        if own is not None and self._in_use != {each.hex() for each in own}:
            with contextlib.suppress(OSError):  # then all of them stay in it
                self._say_in_use(own)

    def _strange(self, artifact: LocalArtifact) -> list[bytes]:
        """Ids of it and its companion, but of what came with the installation."""
        folders = filter(None, (artifact.folder, artifact.companion))
        ids = [self._id_of(artifact, folder) for folder in folders]
        return [each for each in ids if each not in self._world.installed]

    def _admitted(
        self, job: TrainingJob
    ) -> tuple[tuple[LocalArtifact, ...], list[bytes], list[TriedArtifact]]:
        """The artifacts that may run; of them, and of their companions, those that did not come
        with the installation, and what is known of these."""
        allowed: list[LocalArtifact] = []
        strange: list[bytes] = []
        known: list[TriedArtifact] = []
        held: list[ArtifactHeld] = []
        for artifact in job.artifacts:
            found: dict[bytes, TriedArtifact] = {}
            try:
                for folder in filter(None, (artifact.folder, artifact.companion)):
                    artifact_id = self._id_of(artifact, folder)
                    if artifact_id not in self._world.installed:
                        found[artifact_id] = self._require_tried(
                            artifact_id, folder, job.terms.train_seconds
                        )
            except ArtifactHeld as why:
                held.append(why)
                continue
            allowed.append(artifact)
            strange += found.keys()
            known += found.values()
        if held and not allowed:
            raise held[0]
        return tuple(allowed), strange, known

    def _require_tried(
        self, artifact_id: bytes, folder: Path, train_seconds: float
    ) -> TriedArtifact:
        home = self._world.home
        if folder == home.artifact_folder(artifact_id) and not home.has_artifact(artifact_id):
            raise ArtifactHeld(
                f"the artifact {artifact_id.hex()[:12]} was changed in this device's home since it "
                "came; it is fetched again for the next round",
                Reason.DISK,
            )
        known = self._store.find(artifact_id)
        if known is not None and (left := known.seconds_held(self._now())):
            raise _held(artifact_id, known, left)
        if known is not None and known.passed:
            return known
        least, most = _TRIAL_SECONDS
        own = self._world.options.most_step_seconds
        limits = TrialLimits(
            min(max(least, train_seconds), most) if own is None else own,
            self._world.options.most_memory_bytes,
            _MORE_SECONDS,
        )
        if artifact_id in self._untried:
            return TriedArtifact(False) if known is None else known
        result = self._world.try_artifact(folder, limits, self._stopped)
        # What the loader refuses is told as ever, by whoever trains with it.
        if result is not None and result.reason not in (None, Reason.DOES_NOT_FIT):
            assert result.reason is not None
            if result.certain:
                row = self._store.strike(artifact_id, result.reason, result.detail, self._now())
            else:
                row = self._doubt(artifact_id, result.reason, result.detail)
            raise _held(artifact_id, row, row.seconds_held(self._now()))
        if result == PASSED:
            self._store.passed(artifact_id)
        elif result is None and self._stopped():
            raise CallEnded("the device was stopped in the middle of an artifact's first run")
        elif result is None:
            self._untried.add(artifact_id)
        return TriedArtifact(True) if known is None else known

    def _stopped(self) -> bool:
        return self._world.watch.ended == "stopped"

    def _id_of(self, artifact: LocalArtifact, folder: Path) -> bytes:
        # A folder of the home has the id for a name; an installed one is known by its place.
        if folder == artifact.folder:
            return artifact.artifact_id
        places = {place: each for each, place in self._world.installed.items()}
        return places.get(folder) or bytes.fromhex(folder.name)

    def _left_in_use(self) -> list[bytes]:
        """What a process before was in the middle of when it ended."""
        if self._world.home.read_only:
            return []
        with contextlib.suppress(OSError, ValueError):
            lines = self._file.read_text(encoding="ascii").split()
            return [bytes.fromhex(line) for line in lines if len(line) == _ID_DIGITS]
        return []

    def _note_deaths(self) -> None:
        while self._died:  # where the disk is full, those that are left come at the next round
            detail = "the app's process ended in the middle of its training, again and again"
            self._doubt(self._died[-1], Reason.CRASHED, detail)
            self._died.pop()
        self._file.unlink(missing_ok=True)

    def _doubt(self, artifact_id: bytes, reason: Reason, detail: str) -> TriedArtifact:
        """It may have done harm, if not for certain."""
        return self._store.strike(artifact_id, reason, detail, self._now(), certain=False)


def _held(artifact_id: bytes, known: TriedArtifact, seconds: int) -> ArtifactHeld:
    minutes = max(1, round(seconds / 60))
    when = f"in {minutes} min" if minutes < 100 else f"in {round(minutes / 60)} h"
    return ArtifactHeld(
        f"the artifact {artifact_id.hex()[:12]} is not run on this device: {known.detail}. It is "
        f"tried again {when if seconds else 'in the next round'}, and a task that is replaced with "
        "another artifact goes on",
        Reason(known.reason),
    )
