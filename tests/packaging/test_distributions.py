"""What `make release` refuses, and that what it builds is the same each time."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.device_install import build_wheel
from benchmarks.distributions import (
    NOT_TRIED,
    TRIALS,
    contents,
    digest,
    extras_of,
    found,
    wrong_with,
)

_KEY = "-----BEGIN " + "PRIVATE KEY-----"
Change = Callable[[dict[str, bytes]], object]


def changed(wheel: Path, folder: Path, change: Change, *, listed: bool = True) -> Path:
    """A copy of the wheel with other contents; ``listed``: its RECORD is of these."""
    files = contents(wheel)
    change(files)
    (record,) = (name for name in files if name.endswith("/RECORD"))
    if listed:
        files[record] = "".join(f"{name},{_said(files[name])},\n" for name in files).encode()
    path = folder / wheel.name
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def _said(content: bytes) -> str:
    made = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"sha256={made}"


def test_nothing_is_wrong_with_the_wheel_of_this_checkout(wheel: Path, tmp_path: Path) -> None:
    assert wrong_with(wheel, (str(Path(__file__).parents[2]),)) == []
    assert wrong_with(changed(wheel, tmp_path, lambda files: None), ()) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("device_sdk/tests/fake.py", "", "device_sdk/tests/fake.py is of a test"),
        ("aggregator/test_it.py", "", "aggregator/test_it.py is of a test"),
        ("device_sdk/made.py", "A = '/srv/here/x'", "device_sdk/made.py holds the path /srv/here"),
        ("export/a.pem", f"{_KEY}\n", "export/a.pem holds a private key"),
        ("more/a.py", "", "it holds aggregator, device_sdk, export, more"),
    ],
)
def test_what_is_wrong_is_said(
    wheel: Path, tmp_path: Path, name: str, content: str, said: str
) -> None:
    other = changed(wheel, tmp_path, lambda files: files.update({name: content.encode()}))
    assert wrong_with(other, ("/srv/here",)) == [said]


def test_a_list_of_digests_that_is_of_other_contents_is_told(wheel: Path, tmp_path: Path) -> None:
    def change(files: dict[str, bytes]) -> None:
        files["device_sdk/__init__.py"] += b"\n"
        del files["export/__init__.py"]

    assert wrong_with(changed(wheel, tmp_path, change, listed=False), ()) == [
        "RECORD has another digest of device_sdk/__init__.py",
        "RECORD lists other files: export/__init__.py",
    ]


def test_metadata_that_is_not_valid_is_told(wheel: Path, tmp_path: Path) -> None:
    def change(files: dict[str, bytes]) -> None:
        (name,) = (each for each in files if each.endswith("/METADATA"))
        files[name] = files[name].replace(b"Requires-Python: >=", b"Requires-Python: about ")

    (said,) = wrong_with(changed(wheel, tmp_path, change), ())
    assert "requires-python" in said


def test_two_builds_have_the_same_bytes(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1760000000")
    one, other = (digest(build_wheel(tmp_path / each)) for each in ("one", "other"))
    assert one == other
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1770000000")
    assert digest(build_wheel(tmp_path / "later")) != one


def test_every_trial_is_of_an_extra_that_the_wheel_has(wheel: Path) -> None:
    extras = extras_of(wheel)
    assert {*TRIALS, *NOT_TRIED} - {""} <= set(extras)
    assert {extra for trial in TRIALS.values() for extra in trial.extras} <= set(extras)


def test_an_interpreter_is_found_by_its_version() -> None:
    here = "{}.{}".format(*sys.version_info[:2])
    assert found(here) is not None
    assert found("2.0") is None
