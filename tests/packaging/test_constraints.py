"""constraints.txt pins the whole environment that the checks run in."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


def pins() -> dict[str, Version]:
    """Canonical name and version of each pin. A line of any other form fails."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9-]+)==(\S+)", line)
            assert match, f"constraints.txt: {line!r} is not of the form name==version"
            found[match[1]] = Version(match[2])
    return found


def stated() -> list[Requirement]:
    """Every requirement that pyproject.toml states, in the base and in any extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(text) for texts in (project["dependencies"], *extras) for text in texts]


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """Canonical names of all that the requirements bring on this machine."""
    found: set[str] = set()
    waiting = [(each, "") for each in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name in found and not requirement.extras:
            continue
        found.add(name)
        below = [Requirement(text) for text in metadata.requires(name) or []]
        waiting += [(each, wanted) for each in below for wanted in ("", *requirement.extras)]
    return found


def test_every_stated_requirement_is_pinned_within_its_range() -> None:
    pinned = pins()
    for requirement in stated():
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"add {name} to constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{name}: pin outside {requirement}"


def test_everything_that_the_requirements_bring_is_pinned() -> None:
    try:
        brought = closure(stated())
    except metadata.PackageNotFoundError as missing:
        pytest.skip(f"not every extra is installed here: {missing}")
    assert sorted(brought - pins().keys()) == []


def test_nothing_of_cuda_is_pinned() -> None:
    assert not [name for name in pins() if re.match(r"nvidia|cuda|triton", name)]


def test_the_pins_stay_free_of_indexes_and_local_versions() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "://" not in text
    assert not [str(version) for version in pins().values() if version.local]
