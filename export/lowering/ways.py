"""A step that was recorded in several ways, as one graph.

The recordings are lowered into one graph, in which equal nodes are one node: what they have in
common is there once. What all ways need stands outside; what only some do goes into the branches
of an ``If`` on the condition that the author's code asked about, so that a way that is not taken
is not computed, and can neither fail nor refuse the step.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from export.errors import ExportError
from export.lowering.graph import Graph, live_nodes, used_names, without_indices


@dataclass(frozen=True)
class Way:
    """One recording in the graph.

    ``key`` is equal where two ways compute the same; ``conditions`` are names of bool scalars,
    which this way has ``answers`` to (``negated``: the code in that line asked for the opposite);
    ``values`` and ``infos`` are those of its results.
    """

    key: Hashable
    answers: Sequence[bool]
    lines: Sequence[str]
    negated: Sequence[bool]
    conditions: Sequence[str]
    values: Mapping[str, str]
    infos: Mapping[str, onnx.ValueInfoProto]


@dataclass(frozen=True)
class Split:
    """Ways that differ by the answer to one condition."""

    condition: str
    line: str
    negated: bool
    yes: Tree
    no: Tree


Tree = int | Split
"""A way by its number, or a choice."""


def tree_of(ways: Sequence[Way]) -> Tree:
    """The choices between these ways, without those that were made before or change nothing."""

    def build(among: Sequence[int], depth: int, known: Mapping[str, bool]) -> Tree:
        first = ways[among[0]]
        if depth == len(first.answers):
            return among[0]
        condition = first.conditions[depth]
        sides = {
            answer: [number for number in among if ways[number].answers[depth] == answer]
            for answer in (True, False)
        }
        if condition in known:
            return build(sides[known[condition]], depth + 1, known)
        yes, no = (
            build(sides[answer], depth + 1, {**known, condition: answer})
            for answer in (True, False)
        )
        same = _key(ways, yes) == _key(ways, no)
        return yes if same else Split(condition, first.lines[depth], first.negated[depth], yes, no)

    return build(range(len(ways)), 0, {})


def _key(ways: Sequence[Way], tree: Tree) -> Hashable:
    if isinstance(tree, int):
        return ways[tree].key
    return tree.condition, _key(ways, tree.yes), _key(ways, tree.no)


def said(tree: Tree) -> dict[int, list[str]]:
    """Each way that can be taken, in words: the lines that ask, with the answers."""
    if isinstance(tree, int):
        return {tree: []}
    return {
        number: [f"`{tree.line}` is {answer != tree.negated}", *rest]
        for answer, side in ((True, tree.yes), (False, tree.no))
        for number, rest in said(side).items()
    }


def chosen(
    graph: Graph, ways: Sequence[Way], tree: Tree
) -> tuple[dict[str, str], dict[str, onnx.ValueInfoProto]]:
    """Put the graph's nodes inside and outside of branches; the results' values, and what they are.

    Raises ExportError where the ways' results are of different types.
    """
    return _Placing(graph, ways).done(tree)


class _Placing:
    def __init__(self, graph: Graph, ways: Sequence[Way]) -> None:
        self._graph = graph
        self._ways = ways
        self._nodes = graph.taken_out()
        ends = {name for way in ways for name in (*way.values.values(), *way.conditions)}
        without_indices(self._nodes, used_names(self._nodes) | ends)
        self._needed = [self._live(way.values.values()) for way in ways]

    def done(self, tree: Tree) -> tuple[dict[str, str], dict[str, onnx.ValueInfoProto]]:
        nodes, values, infos = self._placed(tree, set())
        self._graph.nodes += nodes
        return values, infos

    def _live(self, names: Collection[str]) -> set[int]:
        return {id(node) for node in live_nodes(self._nodes, names)}

    def _needed_by_all(self, tree: Tree) -> set[int]:
        """The nodes that every way needs, and those of the condition."""
        if isinstance(tree, int):
            return self._needed[tree]
        every = self._needed_by_all(tree.yes) & self._needed_by_all(tree.no)
        return every | self._live([tree.condition])

    def _placed(
        self, tree: Tree, outside: set[int]
    ) -> tuple[list[onnx.NodeProto], dict[str, str], dict[str, onnx.ValueInfoProto]]:
        """The nodes beside those outside, and the results' values and types."""
        here = self._needed_by_all(tree) - outside
        nodes = [node for node in self._nodes if id(node) in here]
        if isinstance(tree, int):
            way = self._ways[tree]
            return nodes, dict(way.values), dict(way.infos)
        sides = [self._placed(side, outside | here) for side in (tree.yes, tree.no)]
        (_, yes, yes_infos), (_, no, no_infos) = sides
        infos = {name: _either(yes_infos[name], no_infos[name], tree.line) for name in yes}
        differing = [name for name in yes if yes[name] != no[name]]
        branches = {
            branch: self._branch(inner, [(values[name], infos[name]) for name in differing])
            for branch, (inner, values, _) in zip(
                ("then_branch", "else_branch"), sides, strict=True
            )
        }
        joined = {name: self._graph.name("if") for name in differing}
        node = helper.make_node("If", [tree.condition], list(joined.values()), **branches)
        self._graph.producer.update(dict.fromkeys(joined.values(), node))
        return [*nodes, node], {**yes, **joined}, infos

    def _branch(
        self, nodes: list[onnx.NodeProto], results: Sequence[tuple[str, onnx.ValueInfoProto]]
    ) -> onnx.GraphProto:
        made = {name for node in nodes for name in node.output}
        outputs = []
        for value, like in results:
            name = value
            if value not in made:  # from outside, or a result before
                name = self._graph.name("way")
                nodes = [*nodes, helper.make_node("Identity", [value], [name])]
            made.discard(name)
            info = onnx.ValueInfoProto()
            info.CopyFrom(like)
            info.name = name
            outputs.append(info)
        return helper.make_graph(nodes, self._graph.name("way"), [], outputs)


def _either(one: onnx.ValueInfoProto, other: onnx.ValueInfoProto, line: str) -> onnx.ValueInfoProto:
    """The type of a result that is either of these: sizes that differ are free."""
    types = [each.type.tensor_type for each in (one, other)]
    shapes = [
        [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            for dim in t.shape.dim
        ]
        for t in types
    ]
    if types[0].elem_type != types[1].elem_type or len(shapes[0]) != len(shapes[1]):
        raise ExportError(
            f"the ways of a branch on data give {one.name!r} another type or number of axes",
            line=line,
            instead="the same dtype and number of axes in both",
        )
    sizes = [a if a == b else None for a, b in zip(*shapes, strict=True)]
    return helper.make_tensor_value_info(one.name, types[0].elem_type, sizes)
