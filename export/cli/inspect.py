"""`tessera-export inspect DIR`: an artifact's summary for people."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter

from tabulate import tabulate

from device_sdk.artifact import Artifact, Manifest, MetricSource, Port, load_artifact
from device_sdk.system.printable import printable_lines

DESCRIPTION = """\
Check an artifact folder as a device would and print its inputs, outputs, state, parameters, size
and operators."""

EXAMPLES = """\
examples:
  tessera-export inspect artifacts/lenet
  tessera-export inspect artifacts/lenet --json   the manifest, for programs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    artifact = load_artifact(arguments.directory)
    if arguments.json:
        print(json.dumps(json.loads(artifact.manifest.to_json()), indent=2))
    else:
        print(printable_lines(summary(artifact)))
    return 0


def summary(artifact: Artifact) -> str:
    """The printed text."""
    manifest = artifact.manifest
    settings = ", ".join(f"{k}={v}" for k, v in manifest.optimizer.settings.items())
    axes = ", ".join(
        f"{name} ({axis.example} in the example"
        + (f", at least {axis.least}" if axis.least > 1 else "")
        + (f", {axis.least_to_train} to train)" if axis.least_to_train > axis.least else ")")
        for name, axis in manifest.axes.items()
    )
    files = dict(manifest.files)
    if manifest.shared is not None:
        files |= {manifest.shared_file: manifest.shared}
    head = [
        ("name", manifest.name),
        ("id", manifest.id),
        ("opset", manifest.opset),
        ("made with", ", ".join(f"{k} {v}" for k, v in manifest.producer.items())),
        ("optimizer", f"{manifest.optimizer.name}({settings})"),
        ("rate", _rate(manifest)),
        ("free axes", axes or "none"),
        ("threads", "one (the graph adds by ScatterND)" if manifest.sequential else "any"),
        ("metrics", ", ".join(_metric(n, s) for n, s in manifest.metrics.items()) or "none"),
        *([("ignored entries", ", ".join(manifest.ignored))] if manifest.ignored else []),
        ("size", ", ".join(f"{n} {_bytes(f.size)}" for n, f in files.items())),
    ]
    parts = [tabulate(head, tablefmt="plain")]
    for name, graph in manifest.graphs.items():
        rows = [("in", *_row(p)) for p in graph.inputs] + [("out", *_row(p)) for p in graph.outputs]
        counts = Counter({op: n for (_, op), n in artifact.graphs[name].model.operators.items()})
        listed = ", ".join(f"{op} {n}" for op, n in counts.most_common())
        parts.append(
            f"{name}: {sum(counts.values())} nodes ({listed})\n"
            + tabulate(rows, headers=["", "role", "name", "type", "shape", "default"])
        )
    members = [
        (m.name, t.kind, _shape(m.shape), _elements(m.shape), t.name) for t, m in manifest.members()
    ]
    parts.append(
        "parameters and buffers\n"
        + tabulate(members, headers=["name", "kind", "shape", "elements", "state tensor"])
    )
    return "\n\n".join(parts)


def _rate(manifest: Manifest) -> str:
    if manifest.rate is None:
        return "none"
    by = "found by a trial on the example batch" if manifest.rate_by_trial else "the author's"
    return f"{manifest.rate:g}, {by}"


def _metric(name: str, source: MetricSource) -> str:
    if source.output is None:
        return name
    scale = f", {source.scale}" if source.scale else ""
    return f"{name} ({source.output}, {source.target}{scale})"


def _row(port: Port) -> tuple[str, str, str, str, str]:
    default = "" if port.default is None else f"{port.default:g}"
    return port.role, port.of, port.dtype, _shape(port.shape), default


def _shape(shape: tuple[int | str | None, ...]) -> str:
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


def _elements(shape: tuple[int | str | None, ...]) -> str:
    if all(isinstance(size, int) for size in shape):
        return f"{math.prod(size for size in shape if isinstance(size, int)):,}"
    return " x ".join(str(size) for size in shape)


def _bytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} KB"
