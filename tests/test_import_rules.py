"""Who may import whom: a device must never need torch, nor a server what only a device needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.shape import PRODUCT, shape_of
from tests.fakes.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parent.parent
STANDARD = sys.stdlib_module_names


@dataclass(frozen=True)
class Rule:
    """What the files under `folder` may import beside the standard library, and may not at all.

    `folder` may be one file. A name allows itself and what is below it: "device_sdk.wire" allows
    what is in it.
    """

    folder: str
    allowed: frozenset[str]
    banned: frozenset[str] = frozenset()
    apart: str = ""
    """A folder or folders below it that have rules of their own, with spaces between."""

    def permits(self, module: str) -> bool:
        """Whether a file under the folder may import this dotted name."""
        if any(_below(module, name) for name in self.banned):
            return False
        if module.partition(".")[0] in STANDARD:
            return True
        return any(_below(module, name) for name in self.allowed)

    def explain(self) -> str:
        """The rule in words, for the message of a failure."""
        text = (
            f"{self.folder}/ may import the standard library and {', '.join(sorted(self.allowed))}"
        )
        return f"{text}, but not {', '.join(sorted(self.banned))}" if self.banned else text


def _below(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


# Of a benchmark's results, where matplotlib happens to be installed.
_PICTURE = "device_sdk/capability/picture.py"
_DEVICE = frozenset({"device_sdk", "numpy", "onnxruntime", "cryptography", "paho.mqtt"})
# A method's two halves are arithmetic: transport, keys, files and clocks stay outside of them.
_OUTSIDE_A_METHOD = frozenset(
    {"paho", "cryptography", "socket", "ssl"}
    | {"sqlite3", "tempfile", "threading", "time", "datetime"}
)
METHODS = sorted(path.parent.name for path in ROOT.glob("device_sdk/methods/*/learner.py"))
# What both ends agree on: the aggregator may import no more of the device than this.
_CONTRACT = frozenset(
    {f"device_sdk.{name}" for name in ("artifact", "evaluation", "fields", "link", "system")}
    | {"device_sdk.tables", "device_sdk.wire"}
    | {f"device_sdk.methods.{name}" for name in ("labels", "registry", "shared_model", "state")}
    | {f"device_sdk.methods.{name}.contract" for name in METHODS}
)
# Loads onnxruntime, to run an ONNX file before it is written; imported by the function that does.
_CHECK = "device_sdk.standalone_check"
# Runs an artifact in a process of its own, where alone onnxruntime is; imported as the other one.
_TRIAL = "device_sdk.trial"
# Likewise: begins the process that rehearses a task, which is of the simulator.
_REHEARSAL = "device_sdk.rehearsal"
# What a device solves: of a new user folded in, the aggregator's models solve the same.
_SOLVE = frozenset({"device_sdk.methods.scatter.least_squares", "device_sdk.methods.learner"})
_SERVER = frozenset(
    {"numpy", "cryptography", "paho.mqtt", "rich", "tabulate", "scipy", "sklearn", "threadpoolctl"}
    | {"fsspec"}
)


_BELOW_THE_CONSOLE = (
    *(
        "clock",
        "console",
        "errors",
        "evaluation",
        "events",
        "home",
        "keys",
        "look",
        "methods.said",
        "models",
        "operate",
    ),
    *("intervals", "store", "task"),
)
_PAGES = frozenset({"anyio", "argon2", "h11", "jinja2", "markupsafe", "segno", "starlette"}) | {
    "multipart",
    "python_multipart",
    "uvicorn",
}


def _device(folder: str, below: str, libraries: str = "numpy") -> Rule:
    """A folder of the device that may import itself, folders below it, and these libraries."""
    names = {f"device_sdk.{name}" for name in [folder.replace("/", "."), *below.split()]}
    return Rule(f"device_sdk/{folder}", frozenset(names | set(libraries.split())))


def _exporter(folder: str, below: str) -> Rule:
    """A folder of the exporter: itself, what is below it, and the libraries."""
    names = {f"export.{name}" for name in [folder, "errors", "insides", "symbols", *below.split()]}
    return Rule(f"export/{folder}", frozenset(names | {"numpy", "onnx", "sympy", "torch"}))


def _server(
    folder: str, below: str, banned: frozenset[str] = frozenset(), libraries: str = ""
) -> Rule:
    """A folder of the aggregator: itself, folders below it, the contract, the libraries."""
    names = {f"aggregator.{name}" for name in [folder, "errors", "events", *below.split()]}
    allowed = frozenset(names | _CONTRACT | _SERVER | set(libraries.split()))
    return Rule(f"aggregator/{folder}", allowed, banned)


RULES = (
    Rule("device_sdk", _DEVICE, apart=_PICTURE),
    Rule(_PICTURE, frozenset({"device_sdk.capability", "matplotlib"})),
    # From the ground up: each may lean on those named, all of them above it in this list.
    Rule("device_sdk/fields.py", frozenset()),
    _device("artifact", "fields system"),
    _device("system", ""),
    _device("tables", "system"),
    _device("link", "fields system", libraries="numpy paho.mqtt"),
    _device("wire/codec", "fields"),
    _device("wire/arrays", "fields wire.codec"),
    _device("evaluation", "fields wire.codec wire.arrays"),
    _device("wire/seal", "wire.codec system fields", libraries="cryptography"),
    _device(
        "wire/publish",
        "fields wire.codec wire.arrays wire.seal artifact evaluation",
        libraries="cryptography numpy",
    ),
    _device("runtime", "artifact errors system", libraries="numpy onnxruntime"),
    Rule("device_sdk/methods", _DEVICE, banned=_OUTSIDE_A_METHOD | {"device_sdk.train"}),
    *(
        _device(
            f"methods/{name}", "artifact errors fields local_data methods recommend trainer wire"
        )
        for name in METHODS
    ),
    replace(
        _device(
            "capability",
            "artifact errors factorisation fields methods.fedavg.contract rehearsal runtime system "
            "methods.scatter.least_squares trainer trial wire",
        ),
        apart=_PICTURE,
    ),
    _device(
        "home", "artifact errors evaluation fields link system wire", libraries="numpy cryptography"
    ),
    _device(
        "train",
        "artifact capability errors evaluation factorisation home local_data system trainer trial "
        "wire world methods.learner methods.local_steps methods.registry methods.scatter "
        "methods.state",
    ),
    _device(
        "rounds",
        "errors evaluation home link methods.learner system train wire world",
        libraries="numpy cryptography",
    ),
    Rule(
        "aggregator",
        frozenset(
            {"aggregator", "prometheus_client", "psycopg", "ray", _CHECK, _TRIAL, _REHEARSAL}
            | (_CONTRACT | _SOLVE | _SERVER)
        ),
        frozenset({"onnxruntime"}),
        apart="aggregator/simulate aggregator/demo aggregator/evaluation_picture.py "
        "aggregator/console",
    ),
    Rule(
        "aggregator/evaluation_picture.py",
        frozenset({"aggregator", "device_sdk.evaluation", "matplotlib"}),
    ),
    Rule("aggregator/look", frozenset({"aggregator.look"})),
    # Pages over a fleet, which know nothing of what serves it; only its command loads them.
    Rule(
        "aggregator/console",
        frozenset({f"aggregator.{name}" for name in _BELOW_THE_CONSOLE} | _CONTRACT | _PAGES),
    ),
    # A whole fleet on one machine; only its command loads it, when it runs.
    Rule(
        "aggregator/demo",
        frozenset({"aggregator", "device_sdk", "numpy", "rich", "sklearn", "amqtt"}),
    ),
    # The one place that has both halves of a method; only commands load it, when they run.
    Rule(
        "aggregator/simulate",
        frozenset({"aggregator", "device_sdk", "numpy", "tabulate", "matplotlib", "ray"})
        | {"mlflow", "tensorboardX"},
        frozenset(
            {f"aggregator.{name}" for name in ("cli", "keys", "publish", "serve")}
            | {f"device_sdk.{name}" for name in ("agent", "cli", "device", "home", "link")}
            | {"device_sdk.rounds"}
        ),
    ),
    _server("methods", "tables", banned=_OUTSIDE_A_METHOD),
    Rule("aggregator/intervals.py", frozenset({"numpy"})),
    Rule("aggregator/evaluation.py", frozenset({"numpy", "aggregator.intervals"} | _CONTRACT)),
    _server("store", "evaluation methods", libraries="psycopg"),
    _server("task", "evaluation guard methods store tables", libraries=f"{_TRIAL} {_REHEARSAL}"),
    _server("keys", "clock home refusals store"),
    _server("rounds", "evaluation guard keys methods refusals shared store task"),
    _server("publish", "evaluation shared store task"),
    Rule(
        "aggregator/models.py",
        frozenset({f"aggregator.{name}" for name in ("errors", "methods", "store", "task")})
        | _CONTRACT
        | _SOLVE
        | {"numpy", _CHECK},
    ),
    _server(
        "serve",
        "clock evaluation home keys logs publish refusals rounds shared store task",
        libraries=f"prometheus_client {_TRIAL}",
    ),
    # What commands, and whoever else asks, are told and do: above what serves, which knows nothing
    # of it.
    _server(
        "operate",
        "clock evaluation home intervals keys models publish refusals rounds serve store task",
        libraries="prometheus_client",
    ),
    _server(
        "cluster",
        "clock evaluation guard home keys logs methods publish refusals rounds serve shared store "
        "task",
        libraries="ray",
    ),
    Rule(
        "export",
        frozenset(
            {"export", "device_sdk.artifact", "device_sdk.evaluation"}
            | {"device_sdk.system.command_line", "device_sdk.system.printable"}
            | {_TRIAL, _REHEARSAL}
            | {"numpy", "onnx", "onnxruntime", "sympy", "tabulate", "torch"}
        ),
    ),
    _exporter("lowering", "mutation origins"),
    _exporter("rewrites", "arguments lowering mutation short_gradients sizes"),
    _exporter("wing", "lowering rewrites short_gradients"),
)
# What puts the exporter together, and lists what it can do.
_KNOWS_THE_WING = {"export/build.py", "export/cli/operators.py"}


def imports_of(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import in a file of `package`, at any depth.

    `from a.b import c` counts as "a.b.c", since c may be a module. Imports by function count where
    the name is written out, as do those for the type checker only: they make a dependency too.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                above = parents[: len(parents) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield node.lineno, base if alias.name == "*" else f"{base}.{alias.name}"
        elif isinstance(node, ast.Call):
            name = _imported_by_call(node)
            if name is not None:
                yield node.lineno, name


def _imported_by_call(call: ast.Call) -> str | None:
    function = call.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called not in ("import_module", "__import__") or not call.args:
        return None
    first = call.args[0]
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value
    return None


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def offences(rule: Rule, root: Path) -> list[str]:
    """One line for each import under root/folder that the rule does not permit."""
    found = []
    for path in _files(root / rule.folder):
        place = path.relative_to(root)
        if any(map(place.is_relative_to, rule.apart.split())):
            continue
        package = ".".join(place.parent.parts)
        for line, module in imports_of(path.read_text(encoding="utf-8"), package):
            if not rule.permits(module):
                found.append(f"{place}:{line} imports {module}")
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.folder)
def test_imports_follow_the_rule(rule: Rule) -> None:
    assert _files(ROOT / rule.folder), f"{rule.folder} holds no Python files"
    found = offences(rule, ROOT)
    assert not found, "\n".join([rule.explain(), *found])


def test_the_exporters_core_knows_nothing_of_its_wing() -> None:
    found = [
        f"{path}:{line}"
        for path in (each.relative_to(ROOT) for each in _files(ROOT / "export"))
        if "wing" not in path.parts and str(path) not in _KNOWS_THE_WING
        for line, module in imports_of((ROOT / path).read_text(), ".".join(path.parent.parts))
        if _below(module, "export.wing")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import torch", "torch"),
        ("import numpy as np, torch.nn as nn", "torch.nn"),
        ("def late():\n    from torch import nn", "torch.nn"),
        ("if TYPE_CHECKING:\n    import onnx", "onnx"),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", "torch"),
        ("import importlib\nimportlib.import_module('export.trace')", "export.trace"),
        ("module = __import__('aggregator')", "aggregator"),
        ("from ...aggregator import rounds", "aggregator.rounds"),
        ("from torch import *", "torch"),
        ("import tabulate2", "tabulate2"),
    ],
)
def test_an_import_is_found_wherever_it_hides(tmp_path: Path, source: str, module: str) -> None:
    nested = tmp_path / "device_sdk" / "wire"
    nested.mkdir(parents=True)
    (nested / "frame.py").write_text(source, encoding="utf-8")
    (found,) = offences(RULES[0], tmp_path)
    assert found.startswith("device_sdk/wire/frame.py:")
    assert found.endswith(f" imports {module}")


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np",
        "from __future__ import annotations",
        "from paho.mqtt import client",
        "from . import cbor",
        "from ..artifact.manifest import Manifest",
        "def late():\n    import device_sdk.trainer",
    ],
)
def test_what_the_rule_permits_passes(tmp_path: Path, source: str) -> None:
    nested = tmp_path / "device_sdk" / "wire"
    nested.mkdir(parents=True)
    (nested / "frame.py").write_text(source, encoding="utf-8")
    assert offences(RULES[0], tmp_path) == []


# Imports every module of a package where the named ones cannot be found, and prints what came in.
_IMPORT_EVERYTHING = """
import importlib, importlib.abc, pkgutil, sys

package, blocked = sys.argv[1], frozenset(sys.argv[2].split(","))
apart = sys.argv[3] if len(sys.argv) > 3 else "none"

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)
        return None

sys.meta_path.insert(0, Blocker())
module = importlib.import_module(package)
for found in pkgutil.walk_packages(module.__path__, package + "."):
    beside = any((found.name + ".").startswith(each + ".") for each in apart.split())
    if not found.name.endswith("__main__") and not beside:
        importlib.import_module(found.name)
for name in getattr(module, "__all__", ()):
    getattr(module, name)
print("\\n".join(sorted(sys.modules)))
"""


def _modules_after_importing(
    package: str, blocked: frozenset[str], apart: str = "none"
) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_EVERYTHING, package, ",".join(sorted(blocked)), apart],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"importing all of {package} failed:\n{done.stderr}"
    return set(done.stdout.split())


def test_the_whole_device_imports_without_what_only_others_install() -> None:
    blocked = frozenset(
        {"torch", "onnx", "onnxscript", "sympy", "rich", "amqtt", "matplotlib"}
        | {"aggregator", "export", "hypothesis", "pytest"}
    )
    modules = _modules_after_importing("device_sdk", blocked)
    assert {"device_sdk", "device_sdk.trainer", "onnxruntime"} <= modules
    assert not {name for name in modules if name.partition(".")[0] in blocked}


def test_the_aggregator_imports_no_more_of_the_device_than_the_contract() -> None:
    blocked = frozenset({"torch", "onnx", "onnxruntime", "export", "matplotlib", "ray"}) | _PAGES
    apart = "aggregator.simulate aggregator.demo aggregator.console"
    modules = _modules_after_importing("aggregator", blocked, apart)
    assert "aggregator" in modules
    device = {name for name in modules if _below(name, "device_sdk")} - {"device_sdk"}
    packages = {"device_sdk.wire", "device_sdk.methods"} | {
        f"device_sdk.methods.{name}" for name in METHODS
    }
    beyond = {name for name in device if not any(_below(name, part) for part in _CONTRACT)}
    assert not beyond - packages - _SOLVE


def test_a_class_name_stands_once() -> None:
    """In one file of the product: a reader who searches for it finds one thing."""
    assert shape_of(ROOT, PRODUCT).twice == {}
