"""The manifest: what an artifact's files are and what each tensor in them is for."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Final

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.parts import (
    AVERAGE_LAG,
    RATE_BY_TRIAL,
    FileName,
    GraphFile,
    Member,
    MetricSource,
    Name,
    Part,
    Port,
    Shape,
    StateTensor,
    axes_of,
    resolve,
)
from device_sdk.artifact.safetensors import canonical_json, strict_json
from device_sdk.artifact.submodels import Submodel
from device_sdk.fields import Key, Misfit, OneOf, Such, Within, plain, read

FORMAT: Final = "tessera-artifact"
FORMAT_VERSION: Final = 1
MANIFEST_FILE: Final = "manifest.json"
INITIAL_FILE: Final = "initial.safetensors"
MAX_MANIFEST_BYTES: Final = 16 * 2**20
MAX_FILE_BYTES: Final = 2**31 - 1
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


Size = Annotated[int, Within(1)]


@dataclass(frozen=True)
class Axis(Part):
    """A named length that is free at run time, from `least` on, and in a train step from
    `least_to_train` on: a variance of one row is none.

    `example` is its size in initial.safetensors.
    """

    example: Size
    least: Size = 1
    least_to_train: Size = 1

    def check(self) -> None:
        least = max(self.least, self.least_to_train)
        if self.example < least:
            raise ArtifactError(f"an axis' example size is {self.example}, below {least}")


@dataclass(frozen=True)
class FileEntry(Part):
    """Size in bytes and SHA-256 (lower-case hex) of one file."""

    size: Annotated[int, Within(0, MAX_FILE_BYTES), Key("bytes")]
    sha256: Annotated[str, Such(_SHA256.match, "a SHA-256 in lower-case hex")]

    @classmethod
    def of(cls, data: bytes) -> FileEntry:
        """The entry that describes these bytes."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class OptimizerSpec(Part):
    """Name of the optimizer inside the graph and the settings that were built into it.

    Settings are finite numbers, truth values, texts, None, and lists of these, kept as tuples.
    """

    name: Name
    settings: Mapping[Name, Any]

    def check(self) -> None:
        settings = {key: _frozen(value, 0) for key, value in self.settings.items()}
        object.__setattr__(self, "settings", settings)


def _frozen(value: object, depth: int) -> object:
    if isinstance(value, (list, tuple)) and depth < 4:
        return tuple(_frozen(entry, depth + 1) for entry in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ArtifactError(f"optimizer settings are finite numbers, not {value}")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ArtifactError(
        f"optimizer settings are numbers, strings and lists of them, not {type(value).__name__}"
    )


@dataclass(frozen=True)
class Manifest(Part):
    """Everything a runtime must know about an artifact. Construction checks that it is consistent.

    `graphs` holds "train", where the artifact can predict "infer", and where one of its `metrics`
    is the loss "evaluate": loss and outputs in evaluation mode. `metrics` says, by a metric's name,
    what it is about. `files` describes every file of the folder but the manifest itself. `ignored`
    are batch entries that its author has and no graph has a use for. `submodel`: of which full
    model this one is a part; its values are then the task's to bring, and `initial.safetensors`
    holds only those that stay as they are. `shared`: a safetensors file with more of those, which
    lies beside the artifact's folder under the name `shared_file` and is the same for all rungs of
    a ladder: a frozen backbone is fetched and kept once.
    """

    name: Name
    opset: Size
    axes: Mapping[Name, Axis]
    state: tuple[StateTensor, ...]
    optimizer: OptimizerSpec
    graphs: Mapping[Annotated[str, OneOf(("train", "infer", "evaluate"))], GraphFile]
    files: Mapping[FileName, FileEntry]
    producer: Mapping[Name, Name]
    sequential: bool
    metrics: Mapping[Name, MetricSource] = field(default_factory=dict)
    ignored: tuple[Name, ...] = ()
    submodel: Submodel | None = None
    shared: FileEntry | None = None

    def check(self) -> None:
        _refuse_duplicates(list(self.ignored), "ignored batch entries")
        self._check_state()
        self._check_graphs()
        self._check_metrics()
        self._check_submodel()
        if any(name.lower() == MANIFEST_FILE for name in self.files):
            raise ArtifactError(f"{MANIFEST_FILE} cannot describe itself: leave it out of files")
        for name in [INITIAL_FILE, *(graph.file for graph in self.graphs.values())]:
            if name not in self.files:
                raise ArtifactError(f"files has no entry for {name}")

    def _check_state(self) -> None:
        _refuse_duplicates([tensor.name for tensor in self.state], "state tensors")
        _refuse_duplicates([member.name for _, member in self.members()], "parameters and buffers")
        counters = [tensor.name for tensor in self.state if tensor.kind == "counter"]
        if counters != ["step"]:
            raise ArtifactError(f"expected exactly one counter, named 'step', but found {counters}")
        by_name = self.state_by_name
        for tensor in self.state:
            self._check_axes(tensor.shape, f"state tensor {tensor.name!r}")
            if tensor.kind != "optimizer":
                continue
            if tensor.like is None:
                if axes_of(tensor.shape):
                    raise ArtifactError(
                        f"optimizer state {tensor.name!r} has a named axis: say what it is like"
                    )
                continue
            model = by_name.get(tensor.like)
            if model is None or model.kind not in ("parameter", "buffer"):
                raise ArtifactError(
                    f"optimizer state {tensor.name!r} is like {tensor.like!r}, which is neither a "
                    "parameter nor a buffer"
                )
            leading = len(tensor.shape) - len(model.shape)
            if (
                leading < 0
                or tensor.shape[leading:] != model.shape
                or axes_of(tensor.shape[:leading])
            ):
                raise ArtifactError(
                    f"optimizer state {tensor.name!r} has shape {list(tensor.shape)}, but is like "
                    f"{model.name!r} of shape {list(model.shape)}: expected that, after fixed axes"
                )

    def _check_graphs(self) -> None:
        if "train" not in self.graphs:
            raise ArtifactError("graphs: 'train' is missing")
        for graph in self.graphs.values():
            for port in (*graph.inputs, *graph.outputs):
                self._check_port(graph, port)
        train = self.graphs["train"]
        # A buffer that is no output is one that a step leaves as it is, and need not even read; one
        # that is no input is one that a step writes whole.
        new = {port.of for port in train.new_state}
        moved = {t.name for t in self.state if t.kind != "buffer"}
        odd = [tensor.name for tensor in self.state if tensor.frozen and tensor.name in new]
        if odd:
            raise ArtifactError(f"{train.file}: changes the frozen state {odd[0]!r}")
        odd = [tensor.name for tensor in self.state if tensor.in_place]
        if odd and not train.is_gated:
            raise ArtifactError(
                f"{train.file}: has no outputs begun and done, which the state in place {odd[0]!r} "
                "needs"
            )
        for side, found in (("input", {p.of for p in train.select("state")}), ("output", new)):
            missing = moved - found
            if missing:
                raise ArtifactError(
                    f"{train.file}: state without a matching {side}: {', '.join(sorted(missing))}"
                )
        for role in ("loss", "guard"):
            if not train.select(role):
                raise ArtifactError(f"{train.file}: has no {role} output")
        batch = {port.of: port for port in train.select("batch")}
        for name, graph in self.graphs.items():
            if name == "train":
                continue
            given = ("output",) if name == "infer" else ("output", "loss")
            odd = [p.name for p in graph.inputs if p.role not in ("state", "batch")]
            odd += [p.name for p in graph.outputs if p.role not in given]
            if odd or not graph.outputs:
                raise ArtifactError(
                    f"{graph.file}: takes state and batch inputs and gives outputs; found "
                    f"{odd or 'no output'}"
                )
            for port in graph.select("batch"):
                twin = batch.get(port.of, port)
                if (twin.dtype, twin.shape) != (port.dtype, port.shape):
                    raise ArtifactError(f"batch entry {port.of!r} differs between the graphs")

        used = {port.of for graph in self.graphs.values() for port in graph.select("batch")}
        if used & set(self.ignored):
            raise ArtifactError(f"batch entry {min(used & set(self.ignored))!r} is not ignored")

    def _check_metrics(self) -> None:
        evaluate = self.graphs.get("evaluate")
        if evaluate is not None and not (self.metrics and evaluate.select("loss")):
            raise ArtifactError(f"{evaluate.file}: gives no loss, or no metric is about it")
        graph = self.evaluation_graph
        entries = {port.of for port in self.graphs["train"].select("batch")}
        outputs = {port.of for port in graph.select("output")} if graph is not None else set()
        for name, source in self.metrics.items():
            if source.output is None:
                if evaluate is None:
                    raise ArtifactError(f"metric {name!r} is about the loss, which no graph gives")
            elif source.output not in outputs or source.target not in entries:
                raise ArtifactError(
                    f"metric {name!r} is about {source.output!r} and {source.target!r}, which are "
                    "not an output in evaluation mode and a batch entry"
                )

    def _check_submodel(self) -> None:
        if self.submodel is None:
            return
        if self.axes.keys() & {axis for tensor in self.state for axis in axes_of(tensor.shape)}:
            raise ArtifactError("a submodel's tensors have no axes of sizes that may vary")
        held = set(self.submodel.held)
        floats = {m.name for state, m in self.members() if state.dtype == "float32"}
        if odd := sorted(held - (self.frozen_members & floats)):
            raise ArtifactError(f"submodel: {odd[0]!r} is not held as it is")
        if odd := sorted(set(self.submodel.pieces) - self.given):
            raise ArtifactError(f"submodel: {odd[0]!r} is no tensor that a step moves, or is held")
        self._check_factors(self.submodel)

    def _check_factors(self, submodel: Submodel) -> None:
        shapes = {m.name: resolve(m.shape, self.example_sizes) for _, m in self.members()}
        ranks: dict[str, set[int]] = {}
        for name, piece in submodel.pieces.items():
            if piece.role == "scale" and name not in submodel.held:
                raise ArtifactError(f"submodel: {name!r} is the scale of factors, and is not held")
            if piece.role != "slice":
                shape = shapes[name]
                rank = shape[-1:] if piece.role == "left" else shape[:1]
                ranks.setdefault(piece.of, set()).update(rank)
        for name, own in ranks.items():
            if len(own) > 1:
                told = " and ".join(map(str, sorted(own)))
                raise ArtifactError(f"submodel: {name!r} has factors of ranks {told}")

    @property
    def shared_file(self) -> str:
        """Name of the file that `shared` describes: its SHA-256; empty where there is none."""
        return "" if self.shared is None else f"{self.shared.sha256}.safetensors"

    @cached_property
    def given(self) -> frozenset[str]:
        """Names of the parameters and buffers whose values a task brings: of a submodel, those of
        float32 that a step moves, and those that it holds."""
        if self.submodel is None:
            return frozenset()
        return frozenset(self.moved) | frozenset(self.submodel.held)

    @cached_property
    def fixed(self) -> frozenset[str]:
        """Names of the parameters and buffers that came with the artifact and stay so."""
        held = () if self.submodel is None else self.submodel.held
        return self.frozen_members - frozenset(held)

    @cached_property
    def moved(self) -> Mapping[str, tuple[int, ...]]:
        """Of the float32 parameters and buffers that a step moves: shapes at the example's sizes,
        by their names."""
        return MappingProxyType(
            {
                member.name: resolve(member.shape, self.example_sizes)
                for state, member in self.members()
                if state.dtype == "float32" and member.name not in self.frozen_members
            }
        )

    @property
    def moved_numbers(self) -> int:
        """How many numbers a step moves, by which models are larger or smaller than others."""
        return sum(math.prod(shape) for shape in self.moved.values())

    @property
    def evaluation_graph(self) -> GraphFile | None:
        """Of which the metrics' outputs are: "evaluate", else "infer"; None for neither."""
        return self.graphs.get("evaluate", self.graphs.get("infer"))

    def _check_port(self, graph: GraphFile, port: Port) -> None:
        self._check_axes(port.shape, f"{graph.file}: {port.name!r}")
        if port.role != "state":
            return
        tensor = self.state_by_name.get(port.of)
        if tensor is None:
            raise ArtifactError(f"{graph.file}: {port.name!r} is of unknown state {port.of!r}")
        if (port.dtype, port.shape) != (tensor.dtype, tensor.shape):
            raise ArtifactError(
                f"{graph.file}: {port.name!r} is {port.dtype}{list(port.shape)}, but its state "
                f"tensor {tensor.name!r} is {tensor.dtype}{list(tensor.shape)}"
            )

    def _check_axes(self, shape: Shape, where: str) -> None:
        for axis in axes_of(shape):
            if axis not in self.axes:
                raise ArtifactError(f"{where}: axis {axis!r} is not declared in axes")

    @cached_property
    def state_by_name(self) -> Mapping[str, StateTensor]:
        """The state tensors by name, in order."""
        return MappingProxyType({tensor.name: tensor for tensor in self.state})

    @cached_property
    def kept(self) -> frozenset[str]:
        """State tensors that a step leaves as they are: frozen parameters, constant buffers."""
        return frozenset(self.state_by_name) - {port.of for port in self.graphs["train"].new_state}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """State tensors whose values are the artifact's, and stay so."""
        return frozenset(tensor.name for tensor in self.state if tensor.frozen)

    @cached_property
    def frozen_members(self) -> frozenset[str]:
        """Names of the parameters and buffers that a step leaves as they are."""
        return frozenset(member.name for state, member in self.members() if state.name in self.kept)

    @cached_property
    def average_lags(self) -> Mapping[str, str]:
        """The state tensors whose moving average is kept, and where it is less they."""
        return MappingProxyType(
            {
                tensor.like: tensor.name
                for tensor in self.state
                if tensor.like and tensor.name.endswith(f".{AVERAGE_LAG}.{tensor.like}")
            }
        )

    @property
    def rate(self) -> float | None:
        """The learning rate of steps that are given none; None where a step takes none."""
        ports = self.graphs["train"].select("hyper")
        return next((port.default for port in ports if port.of == "lr"), None)

    @property
    def rate_by_trial(self) -> bool:
        """Whether that was found by a trial at export, for its author gave none."""
        return self.optimizer.settings.get(RATE_BY_TRIAL) is True

    @property
    def example_sizes(self) -> dict[str, int]:
        """Size of each axis in initial.safetensors."""
        return {name: axis.example for name, axis in self.axes.items()}

    def least_sizes(self, *, to_train: bool = False) -> dict[str, int]:
        """The least sizes of those axes that need one above 1."""
        sizes = {
            name: max(axis.least, axis.least_to_train) if to_train else axis.least
            for name, axis in self.axes.items()
        }
        return {name: size for name, size in sizes.items() if size > 1}

    def rows(self, entries: Collection[str], *, to_train: bool = False) -> tuple[int, bool]:
        """The fewest rows of a batch whose entries of these names are cut along their first axis.

        And whether no other number will do.
        """
        ports = (port for graph in self.graphs.values() for port in graph.select("batch"))
        first = {port.shape[0] for port in ports if port.of in entries and port.shape}
        sizes, least = [n for n in first if isinstance(n, int)], self.least_sizes(to_train=to_train)
        return max([1, *sizes, *(least.get(n, 1) for n in first if isinstance(n, str))]), bool(
            sizes
        )

    def members(self) -> Iterator[tuple[StateTensor, Member]]:
        """Every parameter and buffer with the state tensor that holds it, in order."""
        for tensor in self.state:
            for member in tensor.members:
                yield tensor, member

    def to_json(self) -> bytes:
        """The canonical bytes of manifest.json: sorted keys, no insignificant white space."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION}
        return canonical_json({**head, **plain(self)})

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read manifest.json. Raises ArtifactError for anything but a valid canonical manifest."""
        value = strict_json(data, MANIFEST_FILE, MAX_MANIFEST_BYTES)
        # The version comes first: a later version's other keys are no reason to call it malformed.
        if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
            raise ArtifactError(f"manifest: format is not {FORMAT!r}: this is no Tessera artifact")
        version = value.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"manifest: format version {version!r:.20} is unknown to this release, which reads "
                f"{FORMAT_VERSION}: update tessera-edge, or export the artifact again with this one"
            )
        try:
            manifest = read(cls, value)
        except Misfit as misfit:
            raise ArtifactError(str(misfit.below("manifest"))) from None
        if manifest.to_json() != data:
            raise ArtifactError(
                "manifest.json is not in canonical form (sorted keys, no white space): its "
                "identifier would be ambiguous"
            )
        return manifest

    @cached_property
    def id(self) -> str:
        """The artifact's identifier: SHA-256 (hex) of the manifest's bytes."""
        return hashlib.sha256(self.to_json()).hexdigest()


def _refuse_duplicates(names: list[str], what: str) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)[:5]
    if twice:
        raise ArtifactError(f"{what}: {', '.join(twice)} given more than once")
