"""`tessera-export image` and `click`: what they write is what they were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_sdk.artifact import load_artifact
from export.cli import main


def test_image_writes_a_mutual_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "vgg"
    command = ["image", "vgg", "-o", str(folder), "--mutual", "--channels", "3", "--size", "16"]
    assert main([*command, "--classes", "4", "--optimizer", "sgd", "--lr", "0.2"]) == 0
    assert "verified" in capsys.readouterr().out
    manifest = load_artifact(folder).manifest
    ports = {port.of: port for port in manifest.graphs["train"].inputs}
    assert ports["x_pub"].shape == ("public", 3, 16, 16)
    assert ports["teacher"].shape == ("public", 4)
    assert manifest.optimizer.name == "sgd"
    assert ports["lr"].default == pytest.approx(0.2)


def test_the_command_line_names_an_optimizer_and_clips(tmp_path: Path) -> None:
    for name in ("adam", "adamw", "lion", "rmsprop"):
        command = ["image", "lenet", "-o", str(tmp_path / name), "--optimizer", name]
        assert main([*command, "--clip-norm", "2", "--no-verify"]) == 0
        optimizer = load_artifact(tmp_path / name).manifest.optimizer
        assert (optimizer.name, optimizer.settings["clipped.norm"]) == (name, 2.0)


def test_click_writes_the_segmented_optimizer_and_the_given_sizes(tmp_path: Path) -> None:
    folder = tmp_path / "cnn"
    command = ["click", "wide_deep", "-o", str(folder), "--users", "12", "--movies", "30"]
    options = ["--dim", "4", "--attention", "--optimizer", "segmented", "--no-verify"]
    assert main([*command, *options]) == 0
    manifest = load_artifact(folder).manifest
    assert manifest.name == "wide_deep_attention"
    assert manifest.optimizer.name == "segmented"
    shapes = {member.name: member.shape for _, member in manifest.members()}
    assert shapes["embedding.table.weight"] == (12 + 30 + 2 + 7 + 21, 4 + 1)


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (["image", "lenet", "--size", "9"], "size is 9"),
        (["image", "lenet", "--lr", "-1"], "lr is -1"),
        (["image", "lenet", "--clip-norm", "0"], "the limit is 0"),
        (["click", "cnn", "--users", "0"], "field 'user' has 0 values"),
    ],
)
def test_bad_settings_are_explained_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], complaint: str
) -> None:
    assert main([*command, "-o", str(tmp_path / "a")]) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
