"""The table of binary wheels, from files as pip names them."""

from __future__ import annotations

from pathlib import Path

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from benchmarks.device_wheels import PLATFORMS, table


def test_the_table_shows_versions_by_platform_and_gaps(tmp_path: Path) -> None:
    linux = tmp_path / "numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.whl"
    windows = tmp_path / "numpy-2.4.5-cp311-cp311-win_amd64.whl"
    paho = tmp_path / "paho_mqtt-2.2.0-py3-none-any.whl"
    linux.write_bytes(b"x" * 16_900_000)
    windows.write_bytes(b"x" * 100_000)
    paho.write_bytes(b"")
    printed = table({"Linux": {"numpy": linux, "paho-mqtt": paho}, "Windows": {"numpy": windows}})
    header, _, numpy_row, paho_row = printed.splitlines()
    assert header.split() == ["distribution", "Linux", "Windows"]
    assert numpy_row.split() == ["numpy", "2.4.6", "(16.9", "MB)", "2.4.5", "(0.1", "MB)"]
    assert paho_row.split() == ["paho-mqtt", "2.2.0", "(0.0", "MB)"]


def test_the_platforms_are_those_of_devices_with_tags_that_wheels_carry() -> None:
    assert [platform.name for platform in PLATFORMS] == [
        "Linux x86-64",
        "Linux aarch64",
        "macOS arm64",
        "Windows",
    ]
    for platform in PLATFORMS:
        for tag in platform.tags:
            tags = parse_wheel_filename(f"numpy-2.4.6-cp311-cp311-{tag}.whl")[3]
            assert tags == {Tag("cp311", "cp311", tag)}
