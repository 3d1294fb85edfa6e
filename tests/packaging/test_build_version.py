"""Builds of different code have different versions; a release's is its tag."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from build_version import RELEASE, version


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "one")
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "-C", root, *who, *arguments], check=True)


def commit(root: Path, text: str) -> None:
    (root / "file").write_text(text)
    git(root, "add", "file")
    git(root, "commit", "--quiet", "--message", text)


def test_each_commit_has_a_version_of_its_own_below_the_release(checkout: Path) -> None:
    found = [Version(version(checkout))]
    (checkout / "file").write_text("changed")
    found.append(Version(version(checkout)))
    commit(checkout, "two")
    found.append(Version(version(checkout)))
    assert found == sorted(set(found))
    assert found[-1] < Version(RELEASE)


def test_the_tag_is_the_release_while_nothing_is_changed(checkout: Path) -> None:
    git(checkout, "tag", RELEASE)
    assert version(checkout) == RELEASE
    (checkout / "file").write_text("changed")
    assert Version(version(checkout)) < Version(RELEASE)


def test_an_archive_has_the_version_that_it_was_made_with(tmp_path: Path) -> None:
    assert version(tmp_path) == f"{RELEASE}.dev0"
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: x\nVersion: 9.8.7\n")
    assert version(tmp_path) == "9.8.7"
