"""A version's model as files that other programs read: safetensors, and plain ONNX graphs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.errors import AggregatorError
from aggregator.methods.method import Arrays
from aggregator.methods.scatter import ScatterBinding
from aggregator.store.rows import VersionRow
from aggregator.task.artifacts import read_artifacts
from aggregator.task.file import Task
from aggregator.task.warm_start import ITEM_IDS
from device_sdk.artifact import Artifact, ArtifactError, safetensors
from device_sdk.artifact import onnx_writer as write
from device_sdk.artifact.standalone import standalone_onnx
from device_sdk.methods.scatter.contract import SOLVE
from device_sdk.system.version import __version__

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
_OPSET, _IR_VERSION = 18, 8
_MOST_STEPS = 100
_ENOUGH = 1e-10
"""Newton's decrement squared, g.H^-1.g, at which the vector is as good as the minimum."""
LEAST_L2 = 1e-6
"""Without any, a vector that separates liked from unliked items would grow without end."""

# In NumPy, to hold the graphs against.


# Item factors as plain ONNX graphs: one that scores, one that finds a new user's vector.
#
# Of a least-squares model that is what a device solves for its users, a positive definite system of
# K equations (``device_sdk/methods/scatter/least_squares.py``).
#
# Of BPR a device moves its user's vector u, round by round, along the gradient of
#
#     sum over liked p and a random unliked n of softplus(-u.(p - n)) + user_l2 / 2 |u|^2
#
# (``device_sdk/methods/scatter/factor_step.py``). Where it settles is the minimum of the mean over
# all such pairs, which is strictly convex in u: the graph finds it by Newton's method, with no
# draw. The step is log(1 + r) / r, r the largest change of a pair's score that a whole step would
# make: it descends from anywhere, since the third derivative of softplus is bounded by the second
# (Bach 2010, Self-concordant analysis for logistic regression).
#
# Linear systems are solved by Gauss-Jordan elimination, which needs no pivots where the matrix is
# positive definite.


def solved(items: Floats, liked: NDArray[np.int64], unseen_weight: float, l2: float) -> Doubles:
    """The vector of a user who likes these rows of ``items`` [N, K], of least squares."""
    vectors, rows = items.astype(np.float64), np.unique(liked)
    norm = l2 * (len(rows) + unseen_weight * len(items))
    system = unseen_weight * vectors.T @ vectors + vectors[rows].T @ vectors[rows]
    return np.linalg.solve(system + norm * np.eye(items.shape[1]), vectors[rows].sum(axis=0))


def newton(items: Floats, liked: NDArray[np.int64], user_l2: float) -> Doubles:
    """The vector of a user who likes these rows of ``items`` [N, K]; zeros where there are none."""
    vectors = items.astype(np.float64)
    rows = np.unique(liked)
    l2 = max(user_l2, LEAST_L2)
    user = np.zeros(vectors.shape[1])
    others = np.delete(np.arange(len(vectors)), rows)
    if not len(rows) or not len(others):
        return user
    own, rest = vectors[rows], vectors[others]
    pairs = len(rows) * len(others)
    for _ in range(_MOST_STEPS):
        chance = 1 / (1 + np.exp((own @ user)[:, None] - (rest @ user)[None, :])) / pairs
        gradient = rest.T @ chance.sum(0) - own.T @ chance.sum(1) + l2 * user
        bend = chance * (1 - chance * pairs)
        cross = own.T @ bend @ rest
        curvature = own.T @ (bend.sum(1)[:, None] * own) + rest.T @ (bend.sum(0)[:, None] * rest)
        curvature += l2 * np.eye(len(user)) - cross - cross.T
        step = np.linalg.solve(curvature, gradient)
        mine, theirs = own @ step, vectors @ step
        reach = max(mine.max() - theirs.min(), theirs.max() - mine.min())
        user -= (np.log1p(reach) / reach if reach > 1e-9 else 1.0) * step
        if gradient @ step <= _ENOUGH:
            break
    return user


# As graphs. ``_Body`` gathers a graph's nodes.


class _Body:
    def __init__(self, prefix: str = "") -> None:
        self.nodes: list[bytes] = []
        self.constants: dict[str, bytes] = {}
        self._prefix = prefix
        self._count = 0

    def constant(self, name: str, value: object, dtype: str) -> str:
        """An initializer."""
        self.constants[name] = write.tensor(name, np.asarray(value, dtype=dtype))
        return name

    def __call__(self, operator: str, *inputs: str, out: str = "", **how: write.Attribute) -> str:
        """A node with one output, called ``out`` or by a number."""
        self._count += 1
        name = out or f"{self._prefix}{operator.lower()}_{self._count}"
        self.nodes.append(write.node(operator, inputs, [name], **how))
        return name


def score_graph(items: Floats, metadata: Mapping[str, str], producer: tuple[str, str]) -> bytes:
    """Scores of all items for users' vectors, and the best ones.

    In: ``user`` float32 [users, K]; ``seen`` int64 [seen, 2], pairs of a row of ``user`` and an
    item that is not to be among its best, none or many; ``count`` int64 [1]. Out: ``scores``
    float32 [users, N] of all items, seen ones included; ``best_items`` int64 and ``best_scores``
    float32 [users, count], the best first, and of equals the lower row; a score of minus infinity
    where too few are unseen.
    """
    count, width = items.shape
    body = _Body()
    body.constants["items"] = write.tensor("items", items)
    scores = body("Gemm", "user", "items", out="scores", transB=1)
    zero = body.constant("first", [0], "int64")
    pairs = body("Gather", body("Shape", "seen"), zero)
    lowest = body("Expand", body.constant("lowest", -np.inf, "float32"), pairs)
    open_ = body("ScatterND", scores, "seen", lowest)
    most = body("Min", "count", body.constant("items_count", [count], "int64"))
    body.nodes.append(write.node("TopK", [open_, most], ["best_scores", "best_items"], axis=1))
    graph = write.graph(
        "scores",
        body.nodes,
        [
            write.value_info("user", "float32", ("users", width)),
            write.value_info("seen", "int64", ("seen", 2)),
            write.value_info("count", "int64", (1,)),
        ],
        [
            write.value_info("scores", "float32", ("users", count)),
            write.value_info("best_items", "int64", ("users", None)),
            write.value_info("best_scores", "float32", ("users", None)),
        ],
        body.constants.values(),
    )
    return _model(graph, metadata, producer)


def solve_graph(
    items: Floats,
    unseen_weight: float,
    l2: float,
    metadata: Mapping[str, str],
    producer: tuple[str, str],
) -> bytes:
    """A new user's vector from the items that they like, of least squares: :func:`solved` as a
    graph.

    In: ``liked`` int64 [liked], rows. Out: ``user`` float32 [1, K], as :func:`score_graph` takes
    it. Time grows with the number of liked items times K^2, and with K^3.
    """
    everything, width = items.shape
    wide = items.astype(np.float64)
    body = _Body()
    body.constants["items"] = write.tensor("items", items)
    body.constant("unseen", unseen_weight * wide.T @ wide, "float64")
    body.constant("unseen_items", unseen_weight * everything, "float64")
    body.constant("l2", l2, "float64")
    _solver_constants(body, width)

    body.nodes.append(write.node("Unique", ["liked"], ["rows"], sorted=1))
    own = body("Cast", body("Gather", "items", "rows"), to=11)
    across = body("Transpose", own)
    number = body("Cast", body("Shape", "rows"), to=11)
    norm = body("Mul", "l2", body("Add", number, "unseen_items"))
    system = body("Add", "unseen", body("MatMul", across, own))
    system = body("Add", system, body("Mul", norm, "unit"))
    pull = body("ReduceSum", across, "along_columns", keepdims=1)
    user = body("Transpose", _solved(body, system, pull, width))
    body("Cast", user, out="user", to=1)
    return _fold_in(body, width, metadata, producer)


def newton_graph(
    items: Floats, user_l2: float, metadata: Mapping[str, str], producer: tuple[str, str]
) -> bytes:
    """A new user's vector from the items that they like, of BPR's: :func:`newton` as a graph.

    In: ``liked`` int64 [liked], rows. Out: ``user`` float32 [1, K], as :func:`score_graph` takes
    it. Time and memory grow with the number of liked items times that of all items.
    """
    count, width = items.shape
    body = _Body()
    body.constants["items"] = write.tensor("items", items)
    for name, value in (("one", 1.0), ("l2", max(user_l2, LEAST_L2)), ("tiny", 1e-9)):
        body.constant(name, value, "float64")
    body.constant("enough", _ENOUGH, "float64")
    body.constant("along_rows", [0], "int64")
    body.constant("most_steps", _MOST_STEPS, "int64")
    _solver_constants(body, width)
    body.constant("start", np.zeros((width, 1)), "float64")

    body("Cast", "items", out="all", to=11)
    body.nodes.append(write.node("Unique", ["liked"], ["rows"], sorted=1))
    body("Gather", "all", "rows", out="own")
    body("Transpose", "own", out="own_across")
    body("Transpose", "all", out="all_across")
    # The weight of a pair with each item: 0 for liked ones.
    number = body("Shape", "rows")
    nothing = body("Expand", body.constant("nothing", 0.0, "float64"), number)
    ones = body.constant("ones", np.ones(count), "float64")
    unliked = body("ScatterElements", ones, "rows", nothing, axis=0)
    pairs = body("Mul", body("ReduceSum", unliked, keepdims=0), body("Cast", number, to=11))
    body("Div", unliked, body("Max", pairs, "one"), out="weights")
    newton = write.node(
        "Loop",
        ["most_steps", "true", "start"],
        ["found"],
        body=_newton_step(width),
    )
    body.nodes.append(newton)
    across = body("Transpose", "found")
    body("Cast", across, out="user", to=1)
    return _fold_in(body, width, metadata, producer)


def _fold_in(
    body: _Body, width: int, metadata: Mapping[str, str], producer: tuple[str, str]
) -> bytes:
    graph = write.graph(
        "fold_in",
        body.nodes,
        [write.value_info("liked", "int64", ("liked",))],
        [write.value_info("user", "float32", (1, width))],
        body.constants.values(),
    )
    return _model(graph, metadata, producer)


def _newton_step(width: int) -> write.GraphWriter:
    """The body of a loop over u, float64 [K, 1]."""
    body = _Body("newton_")
    mine, theirs = body("MatMul", "own", "u"), body("MatMul", "all", "u")
    gaps = body("Sub", mine, body("Transpose", theirs))
    lost = body("Sigmoid", body("Neg", gaps))
    slope = body("Mul", lost, "weights")
    bend = body("Mul", slope, body("Sub", "one", lost))

    def by_own(pairs: str) -> str:
        return body("ReduceSum", pairs, "along_columns", keepdims=1)

    def by_all(pairs: str) -> str:
        return body("Transpose", body("ReduceSum", pairs, "along_rows", keepdims=1))

    pull = body("MatMul", "all_across", by_all(slope))
    pull = body("Sub", pull, body("MatMul", "own_across", by_own(slope)))
    gradient = body("Add", pull, body("Mul", "l2", "u"))

    curvature = body("MatMul", "own_across", body("Mul", by_own(bend), "own"))
    rest = body("MatMul", "all_across", body("Mul", by_all(bend), "all"))
    curvature = body("Add", curvature, rest)
    cross = body("MatMul", body("MatMul", "own_across", bend), "all")
    curvature = body("Sub", curvature, body("Add", cross, body("Transpose", cross)))
    curvature = body("Add", curvature, body("Mul", "l2", "unit"))

    step = _solved(body, curvature, gradient, width)

    mine, theirs = body("MatMul", "own", step), body("MatMul", "all", step)
    up = body("Sub", _largest(body, mine), _least(body, theirs))
    down = body("Sub", _largest(body, theirs), _least(body, mine))
    reach = body("Max", up, down, "tiny")
    length = body("Div", body("Log", body("Add", "one", reach)), reach)
    body("Sub", "u", body("Mul", length, step), out="u_next")
    decrement = body("ReduceSum", body("Mul", gradient, step), keepdims=0)
    body("Greater", decrement, "enough", out="go_on")
    return write.graph(
        "newton_step",
        body.nodes,
        [
            write.value_info("number", "int64", ()),
            write.value_info("went_on", "bool", ()),
            write.value_info("u", "float64", (width, 1)),
        ],
        [
            write.value_info("go_on", "bool", ()),
            write.value_info("u_next", "float64", (width, 1)),
        ],
    )


def _largest(body: _Body, values: str) -> str:
    return body("ReduceMax", values, keepdims=0)


def _least(body: _Body, values: str) -> str:
    return body("ReduceMin", values, keepdims=0)


def _solver_constants(body: _Body, width: int) -> None:
    """What :func:`_solved` needs, in a graph or in one around it."""
    body.constant("along_columns", [1], "int64")
    body.constant("column", [width, 1], "int64")
    body.constant("unit", np.eye(width), "float64")
    body.constant("width", width, "int64")
    body.constant("true", True, "bool")


def _solved(body: _Body, matrix: str, right: str, width: int) -> str:
    """matrix^-1 right, float64 [K, 1]."""
    system = body("Concat", matrix, right, axis=1)
    body.nodes.append(
        write.node("Loop", ["width", "true", system], ["solved"], body=_elimination(width))
    )
    last = body("Gather", "solved", "width", axis=1)
    return body("Reshape", last, "column")


def _elimination(width: int) -> write.GraphWriter:
    """The body of a loop over the columns of [H | g]: it ends as [1 | H^-1 g]."""
    body = _Body("eliminate_")
    shape = (width, width + 1)
    row = body("Gather", "system", "place", axis=0)
    column = body("Gather", "system", "place", axis=1)
    row = body("Div", row, body("Gather", row, "place", axis=0))
    column = body("Sub", column, body("Gather", "unit", "place", axis=0))
    taken = body("Mul", body("Unsqueeze", column, "along_columns"), row)
    body("Sub", "system", taken, out="system_next")
    body("Identity", "goes_on", out="goes_on_next")
    return write.graph(
        "elimination",
        body.nodes,
        [
            write.value_info("place", "int64", ()),
            write.value_info("goes_on", "bool", ()),
            write.value_info("system", "float64", shape),
        ],
        [
            write.value_info("goes_on_next", "bool", ()),
            write.value_info("system_next", "float64", shape),
        ],
    )


def _model(graph: bytes, metadata: Mapping[str, str], producer: tuple[str, str]) -> bytes:
    return write.model(
        graph, opset=_OPSET, ir_version=_IR_VERSION, producer=producer, metadata=metadata
    )


Format = Literal["safetensors", "onnx"]
_PRODUCER = ("tessera", __version__)
_USERS_TRIED = 5
_TOLERANCE = 1e-4
_MOVED = "running_"
"""What torch calls the buffers that training moves: batch norm's statistics."""


def model_files(
    form: Format, task: Task, row: VersionRow, model: Arrays, item_ids: tuple[str, ...]
) -> dict[str, bytes]:
    """Files by what comes before their suffix: mostly one, under the empty name.

    ``item_ids``: of the rows of ``items``. An ONNX file was run, and says what a device says.
    Raises AggregatorError where it does not, or cannot be made.
    """
    notes = _metadata(task.name, row, item_ids)
    if form == "safetensors":
        return {"": safetensors.encode({**_frozen(task, row), **model}, notes)}
    if bool(row.items) != task.binding.needs_catalogue:
        raise AggregatorError(
            f"version {row.version} is of another method, which task {task.name} had before it was "
            f"replaced by {task.binding.method_name}: take it as safetensors"
        )
    try:
        if isinstance(task.binding, ScatterBinding):
            return _factor_graphs(model, task.binding.settings.training.user_l2, notes)
        return {"": _standalone(task, row, model, notes)}
    except ImportError as error:
        raise AggregatorError(
            f"the ONNX file cannot be checked before it is written: {error}"
        ) from None
    except (ArtifactError, RuntimeError) as error:
        raise AggregatorError(f"version {row.version} as ONNX: {error}") from None


def _metadata(task: str, row: VersionRow, item_ids: tuple[str, ...]) -> dict[str, str]:
    known = {
        "task": task,
        "version": str(row.version),
        "round": str(row.round),
        "artifact": row.artifact,
        "producer": " ".join(_PRODUCER),
        ITEM_IDS: json.dumps(item_ids) if item_ids else "",
    }
    return {name: value for name, value in known.items() if value}


# Models of an artifact.


def _standalone(task: Task, row: VersionRow, model: Arrays, notes: Mapping[str, str]) -> bytes:
    from device_sdk.standalone_check import require_same_outputs

    found = _artifact(task, row)
    if found is None:
        raise AggregatorError(
            f"version {row.version} is of the artifact {row.artifact[:16]}..., which the task file "
            "does not list: name its folder there, or take the version as safetensors"
        )
    folder, artifact = found
    whole = _whole(artifact, model)
    onnx = standalone_onnx(artifact, whole, producer=_PRODUCER, metadata=notes)
    require_same_outputs(folder, whole, onnx, np.random.default_rng(row.version))
    return onnx


def _frozen(task: Task, row: VersionRow) -> dict[str, NDArray[Any]]:
    """What no training moves of the artifact's model, where the task file still lists it: a version
    holds the rest."""
    found = _artifact(task, row)
    if found is None:
        return {}
    frozen = found[1].manifest.frozen_members
    return {name: array for name, array in found[1].initial.items() if name in frozen}


def _artifact(task: Task, row: VersionRow) -> tuple[Path, Artifact] | None:
    """The artifact that a version is of, with its folder, where the task file still lists it."""
    listed = zip(task.artifacts, read_artifacts(task), strict=True)
    here = ((folder, each.artifact) for folder, each in listed)
    return next((found for found in here if found[1].manifest.id == row.artifact), None)


def _whole(artifact: Artifact, model: Arrays) -> dict[str, NDArray[Any]]:
    """With the artifact's own values of buffers that no training moves, or no device shares."""
    kinds = {member.name: state.kind for state, member in artifact.manifest.members()}
    absent = [
        name
        for name, kind in kinds.items()
        if name not in model and (kind == "parameter" or name.rpartition(".")[2].startswith(_MOVED))
    ]
    if absent:
        raise AggregatorError(
            f"{', '.join(absent[:5])} stay on the devices, which share all but these: there is no "
            "whole model to predict with here. Take what is shared as safetensors; an app takes "
            "its device's own model out with Device.model()"
        )
    return {**artifact.initial, **model}


# Item factors.


def _factor_graphs(model: Arrays, user_l2: float, notes: Mapping[str, str]) -> dict[str, bytes]:
    """``user_l2``: of BPR, which names nothing beside its items."""
    from device_sdk.standalone_check import run_standalone

    items = model["items"]
    find: Callable[..., NDArray[Any]]
    if SOLVE in model:
        a0, l2 = model[SOLVE].tolist()
        find = partial(solved, unseen_weight=a0, l2=l2)
        folds = solve_graph(items, a0, l2, notes, _PRODUCER)
    else:
        find = partial(newton, user_l2=user_l2)
        folds = newton_graph(items, user_l2, notes, _PRODUCER)
    scores = score_graph(items, notes, _PRODUCER)
    rng = np.random.default_rng(len(items))
    for _ in range(_USERS_TRIED):
        liked = rng.choice(len(items), size=min(20, len(items) // 2 + 1), replace=False)
        user = run_standalone(folds, {"liked": liked})["user"]
        _require_close("a new user's vector", user[0], find(items, liked))
        given = {"user": user, "seen": np.empty((0, 2), np.int64), "count": np.ones(1, np.int64)}
        _require_close("scores", run_standalone(scores, given)["scores"][0], items @ user[0])
    return {"": scores, ".fold-in": folds}


def _require_close(what: str, found: NDArray[Any], wanted: NDArray[Any]) -> None:
    error = np.abs(found - wanted).max() / max(1e-6, float(np.abs(wanted).max()))
    if not error <= _TOLERANCE:
        raise ArtifactError(f"{what} of the graph and of NumPy differ by {error:.1e}")
