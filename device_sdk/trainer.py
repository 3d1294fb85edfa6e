"""The Trainer: an artifact that learns on this device."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.load import CheckedGraph, load_artifact, load_initial, with_constants
from device_sdk.artifact.manifest import Manifest
from device_sdk.artifact.parts import DTYPES, Port, axes_of, resolve
from device_sdk.artifact.safetensors import Array
from device_sdk.errors import (
    CheckpointError,
    NonFiniteStep,
    ProviderError,
    StateError,
)
from device_sdk.runtime.batch import BatchChecker, BatchMemories
from device_sdk.runtime.providers import (
    CPU,
    STEPS,
    Provider,
    Providers,
    compare,
    passed_over,
    relative_error,
)
from device_sdk.runtime.session import Calls, SessionSettings, make_session, open_session
from device_sdk.runtime.state import (
    Checkpoint,
    Members,
    StateBanks,
    WriteGate,
    check_tensor,
    device_memory,
    initial_state,
    load_checkpoint,
    new_sizes,
    save_checkpoint,
)
from device_sdk.runtime.step import Predictor, StepRunner, StepScalars
from device_sdk.system.clock import Clock, MonotonicClock
from device_sdk.system.lock import Owner
from device_sdk.system.watch import Watch

if TYPE_CHECKING:  # device_sdk.runtime loads it, or says what is missing
    import onnxruntime as ort

_LOG = logging.getLogger("device_sdk")
# Steps that "auto" times on the provider and on the CPU, by turns; the quickest counts.
_TIMED: Final = 3
# From here on copies count, and a step is long enough that planning its memory gains nothing.
_LARGE_STATE_BYTES: Final = 1 << 24


class Trainer:
    """Trains and predicts with an artifact. Use it from one thread at a time, and in the process
    that made it: in a fork, which lacks the session's threads, it raises ForkedError.

    `directory` is the artifact's folder; every file in it is checked. `providers` is "cpu", "cuda",
    "webgpu", "openvino", one of onnxruntime's names, a
    :class:`device_sdk.runtime.providers.Provider`, or a list of these, of which the first that
    works is taken; or "auto": CUDA, WebGPU, OpenVINO, as far as they are here, and the CPU. Any but
    the CPU's trains the first batch's step twice beside the CPU: where the two differ, or it fails,
    or "auto" finds it slower, the CPU takes over (see `provider_report`).
    `threads` work inside one operator; one is fastest for small models, and artifacts whose
    gradients would race use one whatever was asked for. `seed` makes dropout reproducible. `clock`
    times the steps that "auto" compares. `watch` may end what onnxruntime does.

    Raises ArtifactError for a bad artifact, ProviderError where the providers cannot be used. Where
    the watch ends a call, that and every other method that runs a graph raises CallEnded.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        providers: Providers = "auto",
        threads: int = 1,
        seed: int = 0,
        clock: Clock | None = None,
        watch: Watch | None = None,
    ) -> None:
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise ValueError(f"threads is a positive integer, not {threads!r}")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed is an integer, not {seed!r}")
        self._owner: Final = Owner(f"the Trainer of {directory}")
        artifact = load_artifact(directory)
        manifest = artifact.manifest
        if manifest.sequential and threads > 1:
            _LOG.info("%s runs with 1 thread: its gradients race under several", manifest.name)
            threads = 1
        self._manifest: Final = manifest
        initial = initial_state(manifest, artifact.initial)
        large = sum(array.nbytes for array in initial.values()) >= _LARGE_STATE_BYTES
        # A large model's is read again when it is asked for: held, it would be a third copy.
        self._initial: Final = None if large else initial
        self._directory: Final = Path(directory).resolve()
        self._seed = seed
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._calls: Final = Calls(watch, manifest.id)
        self._train: Final = manifest.graphs["train"]
        self._frozen: Final = manifest.frozen
        # Their bytes until a session is made of them; with frozen state inside it may be made anew.
        self._graphs: Final = dict(artifact.graphs)
        # Graphs that a provider which is not the CPU's has yet to show that it computes right.
        self._unproven: Final[dict[str, CheckedGraph]] = {}
        self._times_both: Final = providers == "auto"
        self._report = passed_over(providers)
        if self._report:
            _LOG.info("%s", self._report)
        self._predictors: dict[str, Predictor] = {}
        self._members: Final = Members(manifest)
        others = [graph for name, graph in manifest.graphs.items() if name != "train"]
        self._checker: Final = BatchChecker(
            self._train.select("batch"),
            ignored=[port.of for graph in others for port in graph.select("batch")],
            unused=manifest.ignored,
            least=manifest.least_sizes(to_train=True),
        )
        self._state_axes: Final = {
            axis for tensor in manifest.state for axis in axes_of(tensor.shape)
        }
        self._axes = self._example_axes()
        graph = self._graph("train", initial)
        session, settings = open_session(
            graph, self._train.file, providers, threads, self._calls, patterns=not large
        )
        # None where the session holds frozen state that has been replaced since.
        self._runner: StepRunner | None = None
        try:
            self._open(session, settings, initial)
        except Exception as error:  # onnxruntime's, out of a device's memory
            if settings.host_only:
                raise
            on_cpu = replace(settings, provider=CPU)
            session = make_session(graph, self._train.file, on_cpu, self._calls)
            self._take_cpu(session, str(error), initial)
        if not self._settings.host_only:
            self._unproven["train"] = artifact.graphs["train"]

    # -- training ----------------------------------------------------------------------------------

    def step(
        self, batch: Mapping[str, Array], *, hyper: Mapping[str, float] | None = None
    ) -> float:
        """Train on one batch and return its loss.

        `batch` maps the artifact's entries to arrays of exactly the dtypes and shapes it names;
        entries of the export's example batch that the loss has no use for are ignored, said once;
        `hyper` replaces defaults (see `hyper`) for this step only: `hyper={"lr": 0.01}`.

        Raises BatchError for a wrong batch, NonFiniteStep where loss or new state is not finite,
        GraphRunError where onnxruntime fails. After any of them everything is as before the step,
        and after a signal as before or after it. One exception: where onnxruntime fails, out of
        memory, while a large artifact's step writes in place, GraphRunError says so, and the
        trainer raises StateError until its whole state is set, restored or reset.
        """
        self._owner.require()
        arrays = self._checker.arrays(batch)
        if "train" in self._unproven:
            self._prove(self._unproven["train"], arrays, hyper)
        return self._advance(arrays, hyper)

    def _advance(self, arrays: list[Array], hyper: Mapping[str, float] | None) -> float:
        memory = self._memories.get(tuple([array.shape for array in arrays]), self._axes)
        self._scalars.set(hyper, self._seed, self.step_count)
        if self._runner is None:
            self._runner = self._reopened()
        loss, guard = self._runner.run(memory, arrays)
        if not (math.isfinite(loss) and math.isfinite(guard)):
            raise NonFiniteStep(loss, guard)
        self._banks.commit()
        return loss

    @property
    def outputs(self) -> dict[str, Array]:
        """Copies of the last finished step's extra outputs; empty before the first step."""
        return {name: array.copy() for name, array in self._banks.head.outputs.items()}

    def predict(self, batch: Mapping[str, Array], *, averaged: bool = False) -> dict[str, Array]:
        """The outputs of the artifact's inference graph in evaluation mode.

        With `averaged` by the parameters' moving averages (see `averages`). The batch may hold
        entries that only training needs. Raises BatchError for a wrong batch, GraphRunError where
        onnxruntime fails, ArtifactError where the artifact cannot predict, or keeps no averages.
        """
        found = self._in_evaluation_mode("infer", batch, averaged)
        return {port.of: array for port, array in found}

    def evaluate(
        self, batch: Mapping[str, Array], *, averaged: bool = False
    ) -> tuple[float | None, dict[str, Array]]:
        """The loss in evaluation mode, and the outputs that the artifact's metrics are about.

        The loss is None where no metric of the artifact is about it. The batch may hold entries
        that only training needs. Raises as :meth:`predict` does.
        """
        name = "evaluate" if "evaluate" in self._manifest.graphs else "infer"
        loss: float | None = None
        outputs: dict[str, Array] = {}
        for port, array in self._in_evaluation_mode(name, batch, averaged):
            if port.role == "loss":
                loss = float(array)
            else:
                outputs[port.of] = array
        return loss, outputs

    def _in_evaluation_mode(
        self, name: str, batch: Mapping[str, Array], averaged: bool
    ) -> list[tuple[Port, Array]]:
        self._owner.require()
        if name not in self._predictors:
            if name not in self._graphs:
                raise ArtifactError(
                    f"{self._manifest.name} has no inference graph: export it with predict="
                )
            graph = self._graph(name, self._frozen_state())
            self._predictors[name] = self._predictor(name, graph, CPU)
            if not self._settings.host_only:
                self._unproven[name] = graph
        instead = self._averaged_state() if averaged else {}
        found = self._predictors[name].predict(batch, self._banks, self._axes, instead)
        if name in self._unproven:
            self._prove_predictor(name, batch, instead, found)
        return found

    def _averaged_state(self) -> dict[str, Array]:
        """The averages of the parameters' state tensors, by their names."""
        lags = self._manifest.average_lags
        if not lags:
            raise ArtifactError(
                f"{self._manifest.name} keeps no averages: export it with export.Averaged around "
                "the optimizer"
            )
        return {
            name: np.asarray(self._banks.read(name) + self._banks.read(lag))
            for name, lag in lags.items()
        }

    # -- state -------------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, Array]:
        """Copies of all parameters by torch's names."""
        return self._copies("parameter")

    @property
    def averages(self) -> dict[str, Array]:
        """Copies of the parameters' moving averages by torch's names (`export.Averaged`).

        A parameter without one is itself. Raises ArtifactError where no average is kept.
        """
        return self._copies("parameter", self._averaged_state())

    @property
    def buffers(self) -> dict[str, Array]:
        """Copies of all buffers (batch norm's statistics, say) by torch's names."""
        return self._copies("buffer")

    @property
    def state(self) -> dict[str, Array]:
        """Copies of all state tensors, optimizer state and step count included, by their names."""
        return {
            tensor.name: self._banks.read(tensor.name).copy() for tensor in self._manifest.state
        }

    def set_parameters(self, values: Mapping[str, Array]) -> None:
        """Replace some or all parameters (and buffers) by torch's names.

        Parameters with named axes may come in other sizes; all tensors that share a resized axis
        must come together. Optimizer state whose shape changes restarts at zero, the rest stays.
        Raises StateError, and changes nothing, where a name, dtype or shape is wrong.
        """
        given = {}
        for name, array in values.items():
            tensor, member = self._members.place(name)
            check_tensor(repr(name), array, tensor.dtype, len(member.shape))
            given[name] = (member.shape, array.shape)
        sizes = new_sizes(self._axes, given)
        whole = {}
        packs: dict[str, Array] = {}
        for name, array in values.items():
            tensor, member = self._members.place(name)
            if axes_of(member.shape):
                whole[tensor.name] = array
                continue
            if tensor.name not in packs:
                packs[tensor.name] = self._banks.read(tensor.name).copy()
            self._members.view(name, packs[tensor.name])[...] = array
        self._replace({**whole, **packs}, sizes)

    def set_state(self, values: Mapping[str, Array]) -> None:
        """Replace some or all state tensors by their names (see `state`).

        The rules for sizes are those of `set_parameters`. Raises StateError and changes nothing
        where something is wrong.
        """
        given = {}
        for name, array in values.items():
            tensor = self._manifest.state_by_name.get(name)
            if tensor is None:
                known = ", ".join(self._manifest.state_by_name)
                raise StateError(f"{name!r} is no state tensor; known are {known}")
            check_tensor(repr(name), array, tensor.dtype, len(tensor.shape))
            given[name] = (tensor.shape, array.shape)
        if "step" in values and values["step"].item() < 0:
            raise StateError(f"step counts finished steps, so it is not {values['step'].item()}")
        self._replace(values, new_sizes(self._axes, given))

    def reset(self) -> None:
        """Back to the artifact's initial state and sizes, and to step 0.

        Raises ArtifactError where the artifact is large and its folder is not what it was.
        """
        initial = self._initial
        if initial is None:
            initial = initial_state(self._manifest, load_initial(self._directory, self._manifest))
        self._replace(initial, self._example_axes())
        self._banks.take_up(replace(self._banks.head, outputs={}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write state, step count and seed to one file; a crash leaves the old file whole."""
        state = {tensor.name: self._banks.read(tensor.name) for tensor in self._manifest.state}
        save_checkpoint(path, Checkpoint(self._manifest.id, self._seed, state))

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Continue from a file that `save` wrote, bit for bit.

        Raises CheckpointError for a damaged file or another artifact's, OSError where it cannot be
        read; the trainer is then unchanged.
        """
        checkpoint = load_checkpoint(path)
        if checkpoint.artifact != self._manifest.id:
            raise CheckpointError(
                f"{path} belongs to artifact {checkpoint.artifact:.12}, this trainer runs "
                f"{self._manifest.name} {self._manifest.id:.12}"
            )
        odd = sorted(set(checkpoint.state) ^ set(self._manifest.state_by_name))
        if odd:
            raise CheckpointError(f"{path} does not hold the artifact's state: {odd[0]!r}")
        try:
            self.set_state(checkpoint.state)
        except StateError as error:
            raise CheckpointError(f"{path}: {error}") from None
        self._seed = checkpoint.seed

    # -- facts -------------------------------------------------------------------------------------

    @property
    def artifact(self) -> Manifest:
        """The artifact's manifest."""
        return self._manifest

    @property
    def step_count(self) -> int:
        """Finished steps since the initial state."""
        return self._banks.head.steps

    @property
    def hyper(self) -> dict[str, float]:
        """Hyper-parameters that `step` takes, with their defaults."""
        return dict(self._scalars.defaults)

    @property
    def axes(self) -> dict[str, int]:
        """Present sizes of the named axes of the state."""
        return dict(self._axes)

    @property
    def seed(self) -> int:
        """The seed that dropout masks derive from (with the step count). May be set between steps:
        one trainer then stands for another device."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed

    @property
    def providers(self) -> tuple[str, ...]:
        """onnxruntime's execution providers in use, the preferred one first."""
        return self._settings.providers

    @property
    def provider_report(self) -> str:
        """Why the provider in use is, and why "auto" left out a plugin that is installed.

        Empty for the CPU where there is nothing else, and for another one before its first step.
        """
        return self._report

    @property
    def threads(self) -> int:
        """Threads inside one operator."""
        return self._settings.threads

    # -- providers ---------------------------------------------------------------------------------

    def _open(
        self, session: ort.InferenceSession, settings: SessionSettings, state: Mapping[str, Array]
    ) -> None:
        """Take up a session of the train graph, which holds the frozen part of the state."""
        self._settings = settings
        places = {} if settings.host_only else device_memory(session)
        in_place = [each.name for each in self._manifest.state if each.in_place]
        self._banks = StateBanks(
            self._manifest.state,
            self._shapes(self._axes),
            {port.of: places[port.name] for port in self._train.inputs if port.name in places},
            self._manifest.kept,
            in_place if settings.host_only else (),
            WriteGate(self._train) if self._train.is_gated else None,
        )
        self._memories = BatchMemories(self._train, self._checker)
        self._scalars = StepScalars(self._train)
        self._runner = None
        self._replace(state, self._axes)
        self._runner = self._runner_of(session)

    def _take_cpu(
        self, session: ort.InferenceSession, why: str, state: Mapping[str, Array]
    ) -> None:
        """Go on with the CPU's session."""
        self._report = f"{CPU.title}: {self._settings.provider.title} {why}"
        _LOG.warning("%s runs on %s", self._train.file, self._report)
        self._open(session, replace(self._settings, provider=CPU), state)

    def _prove(
        self, graph: CheckedGraph, arrays: list[Array], hyper: Mapping[str, float] | None
    ) -> None:
        """Train two steps beside the CPU; state is as before, the provider perhaps the CPU.

        Raises what a step on the CPU does: then nothing is known yet.
        """
        state, last = self.state, self.outputs
        start = {name: array for name, array in state.items() if name not in self._frozen}
        provider, on_cpu = self._settings.provider, replace(self._settings, provider=CPU)
        whole = self._with_frozen("train", graph, state)
        session = make_session(whole, self._train.file, on_cpu, self._calls)
        twin = copy.copy(self)
        twin._predictors = {}
        twin._open(session, on_cpu, state)

        def walk(trainer: Trainer, begin: Mapping[str, Array], steps: int) -> dict[str, Array]:
            trainer._replace(begin, trainer._axes)
            for _ in range(steps):
                trainer._advance(arrays, hyper)
            found = trainer.state
            return {name: found[name] for name in start}

        steps, theirs = 1, walk(twin, start, 1)
        # A rate that is too high may show at the second step only, which nobody asked for.
        with contextlib.suppress(NonFiniteStep):
            steps, theirs = STEPS, walk(twin, start, STEPS)
        try:
            ours = walk(self, start, steps)
            agreement = compare(
                start, ours, theirs, provider.tolerance, lambda begin: walk(twin, begin, steps)
            )
            self._report = f"{provider.title}: {agreement.text}"
            why = "" if agreement.holds else f"is wrong: {agreement.text}"
            if not why and self._times_both:
                why = self._slower(twin, arrays, hyper)
        except Exception as error:  # onnxruntime's share no base class
            why = f"fails: {error}"
        del self._unproven["train"]
        if why:
            self._take_cpu(session, why, state)
        else:
            _LOG.info("%s runs on %s", self._train.file, self._report)
            self._replace(start, self._axes)
        self._banks.take_up(replace(self._banks.head, outputs=last))

    def _prove_predictor(
        self,
        name: str,
        batch: Mapping[str, Array],
        instead: Mapping[str, Array],
        wanted: list[tuple[Port, Array]],
    ) -> None:
        """Let the provider predict from now on where it computes what the CPU did."""
        graph, provider = self._unproven.pop(name), self._settings.provider
        try:
            predictor = self._predictor(name, graph, provider)
            found = predictor.predict(batch, self._banks, self._axes, instead)
            pairs = zip(found, wanted, strict=True)
            worst = max(relative_error(ours, theirs) for (_, ours), (_, theirs) in pairs)
            if not worst <= provider.tolerance:
                raise ProviderError(f"its outputs are off by {worst:.1e}")
        except Exception as error:  # onnxruntime's share no base class
            file = self._manifest.graphs[name].file
            _LOG.warning("%s runs on the CPU, not %s: %s", file, provider.title, error)
        else:
            self._predictors[name] = predictor

    def _predictor(self, name: str, graph: CheckedGraph, provider: Provider) -> Predictor:
        return Predictor(
            self._manifest,
            name,
            graph,
            replace(self._settings, provider=provider),
            self._calls,
            constants=[port.name for port in self._constants(name)],
        )

    def _slower(self, twin: Trainer, arrays: list[Array], hyper: Mapping[str, float] | None) -> str:
        """Why the CPU is to be preferred, whose trainer the twin is; "" where it is slower."""
        took: dict[Trainer, float] = {}
        for trainer in (self, twin) * _TIMED:
            start = self._clock.now()
            trainer._advance(arrays, hyper)
            took[trainer] = min(took.get(trainer, math.inf), self._clock.now() - start)
        ours, theirs = took[self] * 1e3, took[twin] * 1e3
        if ours > theirs:
            return f"trains right, but a step takes {ours:.3g} ms, the CPU's {theirs:.3g} ms"
        self._report += f"; a step takes {ours:.3g} ms, the CPU's {theirs:.3g} ms"
        return ""

    # -- inside ------------------------------------------------------------------------------------

    def _graph(self, name: str, state: Mapping[str, Array]) -> CheckedGraph:
        """A graph to make a session of, with the frozen part of the state inside."""
        graph = self._graphs[name] if self._frozen else self._graphs.pop(name)
        return self._with_frozen(name, graph, state)

    def _with_frozen(
        self, name: str, graph: CheckedGraph, state: Mapping[str, Array]
    ) -> CheckedGraph:
        return with_constants(graph, {port.name: state[port.of] for port in self._constants(name)})

    def _constants(self, name: str) -> list[Port]:
        ports = self._manifest.graphs[name].select("state")
        return [port for port in ports if port.of in self._frozen]

    def _frozen_state(self) -> dict[str, Array]:
        return {name: self._banks.read(name) for name in self._frozen}

    def _runner_of(self, session: ort.InferenceSession) -> StepRunner:
        return StepRunner(
            session,
            self._train,
            self._banks,
            self._scalars.tensors,
            self._calls,
            host_only=self._settings.host_only,
            constants=[port.name for port in self._constants("train")],
        )

    def _reopened(self) -> StepRunner:
        graph = self._graph("train", self._frozen_state())
        session = make_session(graph, self._train.file, self._settings, self._calls)
        return self._runner_of(session)

    def _example_axes(self) -> dict[str, int]:
        sizes = self._manifest.example_sizes
        return {axis: sizes[axis] for axis in sizes if axis in self._state_axes}

    def _shapes(self, axes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {tensor.name: resolve(tensor.shape, axes) for tensor in self._manifest.state}

    def _copies(self, kind: str, instead: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Of one kind's members, out of ``instead`` where it has their state tensors."""
        found = {}
        state = dict(instead or {})
        for name in self._members.of_kind(kind):
            holder = self._members.place(name)[0].name
            if holder not in state:
                state[holder] = self._banks.read(holder)
            found[name] = self._members.view(name, state[holder]).copy()
        return found

    def _replace(self, values: Mapping[str, Array], axes: Mapping[str, int]) -> None:
        """Write whole, checked state tensors; zero the optimizer state whose shape changes."""
        self._banks.require_whole(values)
        head = self._banks.head
        zeros: dict[str, Array] = {}
        changed = {axis for axis, size in axes.items() if size != self._axes[axis]}
        for axis in sorted(changed):
            least = self._manifest.axes[axis].least
            if axes[axis] < least:
                raise StateError(f"axis {axis!r} is {axes[axis]}; it must be at least {least}")
        if changed:
            for name, shape in self._shapes(axes).items():
                if shape == self._banks.shapes[name] or name in values:
                    continue
                tensor = self._manifest.state_by_name[name]
                if tensor.kind != "optimizer":
                    axis = min(changed & set(axes_of(tensor.shape)))
                    raise StateError(
                        f"axis {axis!r} changes its size, so {name!r}, which has it too, must be "
                        "given in the same call"
                    )
                zeros[name] = np.zeros(shape, DTYPES[tensor.dtype])
            self._memories.forget(changed)
            self._axes = dict(axes)
        written = {**values, **zeros}
        if any(
            not _same(values[name], self._banks.read(name)) for name in self._frozen & set(values)
        ):
            self._runner = None
            self._predictors.clear()
        resized = [name for name, array in written.items() if self._banks.write(name, array)]
        if self._runner is not None:
            self._runner.bind_state(resized)
        if "step" in values:
            head = replace(head, steps=int(values["step"].item()))
        self._banks.take_up(head)


def _same(one: Array, other: Array) -> bool:
    """Whether two arrays of one dtype have the same shape and bits."""
    bits = f"u{one.itemsize}"
    return np.array_equal(one.view(bits), other.view(bits))
