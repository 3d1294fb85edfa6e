"""The wheel carries the three packages with their artifacts, and nothing else."""

from __future__ import annotations

import configparser
import email
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("device_sdk", "aggregator", "export")
EXTRAS = {
    *("aggregator", "cluster", "console", "export", "demo", "simulate", "tensorboard"),
    *("dev", "docs"),
}


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    """Every file in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def metadata(wheel: Path, names: set[str]) -> Message:
    """The wheel's METADATA."""
    (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(name))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_of_the_package_is_in_the_wheel(names: set[str], package: str) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
    assert modules
    assert modules <= names


def test_what_the_console_draws_is_in_the_wheel(names: set[str]) -> None:
    folder = ROOT / "aggregator/console"
    drawn = [*folder.glob("templates/*"), *folder.glob("static/*")]
    assert drawn and {each.relative_to(ROOT).as_posix() for each in drawn} <= names


def test_nothing_but_the_packages_is_in_the_wheel(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    kinds = {Path(name).suffix for name in names if ".dist-info/" not in name}
    pages = {".html", ".css", ".js", ".svg"}
    assert kinds <= pages | {".py", ".typed", ".onnx", ".safetensors", ".json", ".template"}
    assert not any("__pycache__" in name or "/tests/" in name for name in names)


def test_the_wheel_carries_every_artifact_whole(wheel: Path, names: set[str]) -> None:
    folder = ROOT / "device_sdk" / "artifacts"
    files = {
        path.relative_to(ROOT).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    factorisation = ("train.onnx", "infer.onnx", "initial.safetensors", "manifest.json")
    assert {f"device_sdk/artifacts/mf/{name}" for name in factorisation} <= files.keys()
    assert {name for name in names if name.startswith("device_sdk/artifacts/")} == files.keys()
    with zipfile.ZipFile(wheel) as archive:
        for name, path in files.items():
            assert archive.read(name) == path.read_bytes()


def test_the_type_marker_and_the_licence_come_along(names: set[str]) -> None:
    for package in ("aggregator", "device_sdk", "export"):
        assert f"{package}/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_device_depends_on_these_and_no_more(metadata: Message) -> None:
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    base = {each.name for each in requirements if "extra" not in str(each.marker)}
    assert base == {"cryptography", "numpy", "onnxruntime", "paho-mqtt"}
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    assert not [str(each) for each in requirements if each.url is not None]
    (runtime,) = (each for each in requirements if each.name == "onnxruntime")
    assert runtime.marker is not None
    for machine in ("x86_64", "aarch64", "arm64", "AMD64", "armv8l", "armv7l", "armv6l"):
        installed = not machine.startswith("armv")
        assert runtime.marker.evaluate({"platform_machine": machine}) is installed


def test_the_three_commands_are_declared(wheel: Path, names: set[str]) -> None:
    (name,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    parser = configparser.ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        parser.read_string(archive.read(name).decode())
    assert dict(parser["console_scripts"]) == {
        "tessera-device": "device_sdk.cli:main",
        "tessera-export": "export.cli:main",
        "tessera-aggregator": "aggregator.cli:main",
    }


def test_the_metadata_names_the_distribution_and_its_python(metadata: Message) -> None:
    assert metadata["Name"] == "tessera-edge"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
