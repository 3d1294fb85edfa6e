"""Which methods are installed, and what is said where one cannot be used."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from aggregator.errors import TaskError
from aggregator.methods.method import Binding, read_binding
from aggregator.tables import TomlTable
from aggregator.task.file import read_task
from device_sdk.methods import registry
from device_sdk.methods.learner import Declined, Learner
from device_sdk.methods.registry import (
    LEARNERS,
    METHODS,
    MethodError,
    load_method,
    method_names,
)
from device_sdk.train.job import RoundTrainer, learner_class, needs_receipts
from tests.fakes.quick import run_python

ROOT = Path(__file__).resolve().parents[3]
BUILT_IN = ["attention", "fedavg", "mutual", "prototypes", "scatter", "teacher_logits"]
KINDS = {LEARNERS: (Learner, RoundTrainer), METHODS: (Binding,)}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    load_method.cache_clear()
    yield
    load_method.cache_clear()


def install(folder: Path, package: str, entries: str, code: str = "") -> None:
    """What pip leaves of a package: its metadata, and one module."""
    told = folder / f"{package}-1.0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(entries)
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    sys.modules.pop(module, None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that Python finds."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


def test_the_built_in_methods_come_through_the_same_door() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, kinds in KINDS.items():
        assert sorted(declared[group]) == BUILT_IN
        assert set(method_names(group)) >= set(BUILT_IN)  # somebody's own may be installed, too
        for name in BUILT_IN:
            assert issubclass(load_method(group, name, *kinds), kinds)


def test_learners_say_themselves_what_they_need() -> None:
    assert [name for name in BUILT_IN if needs_receipts(name)] == ["teacher_logits"]
    assert not needs_receipts("unknown")
    assert [n for n in BUILT_IN if getattr(learner_class(n), "has_movable_work", False)] == [
        "attention"
    ]


def test_a_method_that_no_package_offers_is_named_with_those_that_there_are() -> None:
    known = ", ".join(method_names(METHODS))
    with pytest.raises(MethodError, match=rf"offers the method 'magic'; there are {known}$"):
        load_method(METHODS, "magic", Binding)
    with pytest.raises(Declined, match=r"has no learner for the method 'magic': no installed"):
        learner_class("magic")


def test_an_installation_older_than_its_code_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device_sdk.methods.registry._offered", lambda group: [])
    with pytest.raises(MethodError, match="not even Tessera's own: install it anew"):
        load_method(METHODS, "scatter", Binding)


def test_an_installation_that_names_a_module_which_moved_is_told(site: Path) -> None:
    install(site, "old-method", f"[{METHODS}]\nold = aggregator.methods.fedavg.binding:Thing\n")
    with pytest.raises(MethodError, match=r"old-method 1\.0 .*is newer .* install it anew$"):
        load_method(METHODS, "old", Binding)


def test_a_name_that_two_packages_offer_is_refused_with_both(site: Path) -> None:
    entries = f"[{METHODS}]\nmine = some.module:Thing\n"
    install(site, "one-method", entries)
    install(site, "other-method", entries)
    with pytest.raises(MethodError, match=r"one-method 1\.0 and other-method 1\.0 .*'mine'"):
        load_method(METHODS, "mine", Binding)
    assert method_names(METHODS).count("mine") == 1


@pytest.mark.parametrize(
    ("code", "cause", "message"),
    [
        ("import not_there", ModuleNotFoundError, "No module named 'not_there'"),
        ("1 / 0", ZeroDivisionError, "division by zero"),
        ("raise SystemExit('no licence')", SystemExit, "SystemExit: no licence"),
        ("raise GeneratorExit('odd')", GeneratorExit, "GeneratorExit: odd"),
        (
            "class Mute(Exception):\n    def __str__(self): return 1 / 0\nraise Mute",
            Exception,
            "Mute: its words cannot be had (ZeroDivisionError)",
        ),
        ("", AttributeError, "has no attribute 'Thing'"),
    ],
)
def test_what_cannot_be_imported_is_told_with_package_and_cause(
    site: Path, code: str, cause: type[BaseException], message: str
) -> None:
    install(site, "broken-method", f"[{METHODS}]\nmine = broken_method:Thing\n", code)
    with pytest.raises(MethodError, match=r"broken-method 1\.0 .*'broken_method:Thing'") as raised:
        load_method(METHODS, "mine", Binding)
    assert isinstance(raised.value.__cause__, cause) and message in str(raised.value)


def test_what_is_no_class_of_ours_is_refused(site: Path) -> None:
    entries = f"[{METHODS}]\nmine = odd_method:Thing\n[{LEARNERS}]\nmine = odd_method:thing\n"
    install(site, "odd-method", entries, "class Thing: pass\ndef thing(): pass\n")
    with pytest.raises(MethodError, match="expected a subclass of Binding"):
        load_method(METHODS, "mine", Binding)
    with pytest.raises(Declined, match="expected a subclass of Learner or RoundTrainer"):
        learner_class("mine")


@pytest.mark.parametrize("name", ["My Method", "ours.", "méthode", "x" * 65])
def test_a_name_that_cannot_travel_is_refused(site: Path, name: str) -> None:
    install(site, "odd-name", f"[{METHODS}]\n{name} = odd_name:Thing\n")
    with pytest.raises(MethodError, match=r"odd-name 1\.0 offers what cannot be used: .*no name"):
        load_method(METHODS, name, Binding)


def test_a_task_file_names_what_is_wrong_with_its_method(site: Path, tmp_path: Path) -> None:
    install(site, "broken-method", f"[{METHODS}]\nmine = broken_method:Thing\n", "import nowhere")
    task = tmp_path / "task.toml"
    task.write_text('[task]\nmethod = "mine"\n')
    with pytest.raises(TaskError, match=r"task\.method cannot be used: broken-method 1\.0"):
        read_task(task)
    task.write_text('[task]\nmethod = "magic"\n')
    with pytest.raises(TaskError, match=r"'magic'; there are attention, .*mine, .*scatter"):
        read_task(task)


@pytest.mark.parametrize(
    ("body", "lack"),
    [
        ("def build(self, items, rng, artifacts=()): ...", "settings_class, a frozen dataclass"),
        ("settings_class = int", "build and settings_class, a frozen dataclass"),
        ("from aggregator.methods.scatter import ScatterTable as settings_class", "build"),
    ],
)
def test_a_binding_that_says_too_little_is_told_what_it_lacks(
    site: Path, tmp_path: Path, body: str, lack: str
) -> None:
    code = f"from aggregator.methods.method import Binding\nclass Thing(Binding):\n    {body}\n"
    install(site, "bare-method", f"[{METHODS}]\nmine = bare_method:Thing\n", code)
    task = tmp_path / "task.toml"
    task.write_text('[task]\nmethod = "mine"\n')
    with pytest.raises(TaskError, match=rf"cannot be used: the binding Thing lacks {lack}$"):
        read_task(task)


def test_a_task_file_looks_once_at_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looked: list[str] = []
    look = registry._offered

    def noted(group: str) -> list[EntryPoint]:
        looked.append(group)
        return look(group)

    monkeypatch.setattr(registry, "_offered", noted)
    task = tmp_path / "task.toml"
    task.write_text('[task]\nmethod = "fedavg"\nartifact = "shipped:mf"\n')
    read_task(task)
    assert looked == [METHODS]


def test_a_method_is_called_what_its_entry_point_says(site: Path) -> None:
    code = "from aggregator.methods.fedavg import FedAvgBinding as Thing"
    install(site, "second-name", f"[{METHODS}]\nmine = second_name:Thing\n", code)
    assert read_binding("mine", TomlTable({}, "mine")).method_name == "mine"


def loaded_by(*modules: str, work: str = "") -> set[str]:
    """Modules of learners, in a process that imports these and then does some work."""
    code = f"import sys, {', '.join(modules)}\n{work}\nprint(*sys.modules)"
    names = run_python("-c", code, check=True).stdout.split()
    return {name for name in names if name.endswith(".learner")} - {"device_sdk.methods.learner"}


def test_only_the_tasks_learner_is_loaded_and_none_where_nothing_trains() -> None:
    assert loaded_by("device_sdk.device", "device_sdk.agent") == set()
    job = "device_sdk.train.job"
    assert loaded_by(job, work=f"{job}.learner_class('fedavg')") == {
        "device_sdk.methods.fedavg.learner"
    }
