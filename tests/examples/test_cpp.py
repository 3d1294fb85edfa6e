"""The C++ program beside Python's trainer: compiled, and run with the library of npm's package."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import device_sdk
from device_sdk.artifact import safetensors
from examples.javascript import compare
from tests.examples.same_bits import same_bits

HERE = Path(__file__).parent
PROGRAM = compare.HERE.parent / "cpp" / "train.cc"
STEPS = 20


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The program, compiled; skips where compiler or library are missing or do not work."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), "none")
    package = compare.HERE / "node_modules" / "onnxruntime-node"
    library = package / "bin" / "napi-v6" / "linux" / machine / "libonnxruntime.so.1"
    if not library.exists():
        pytest.skip("no libonnxruntime: run npm ci in examples/javascript")
    folder = tmp_path_factory.mktemp("cpp")
    probe = folder / "probe.cc"
    probe.write_text('#include <regex>\nextern "C" void* OrtGetApiBase();\n')
    with probe.open("a") as file:
        file.write("int main() { return OrtGetApiBase() == nullptr; }\n")
    linked = [str(library), f"-Wl,-rpath,{library.parent}"]
    try:
        compare.run(compiler, "-std=c++17", str(probe), *linked, "-o", str(folder / "probe"))
        compare.run(str(folder / "probe"))
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no C++ program runs with libonnxruntime: {error}")
    built = str(folder / "train")
    warnings = ["-Wall", "-Wextra", "-Werror", f"-I{HERE / 'cpp'}"]
    compare.run(compiler, "-std=c++17", *warnings, str(PROGRAM), *linked, "-o", built)
    clean = ["env", "-u", "ORT_DISABLE_TELEMETRY", "-u", "XDG_CACHE_HOME"]
    return lambda home, *arguments: compare.run(*clean, f"HOME={home}", built, *map(str, arguments))


def test_a_cpp_program_trains_as_python_does_bit_by_bit(
    train: Callable[..., str], tmp_path: Path
) -> None:
    work = compare.make("MLP, dropout, Adam", tmp_path)
    trainer = device_sdk.Trainer(work.folder, providers="cpu", threads=1)
    begin, end = tmp_path / "begin.state", tmp_path / "end.safetensors"
    home = tmp_path / "home"
    home.mkdir()
    trainer.save(begin)
    said = train(home, work.folder / "train.onnx", begin, STEPS, end).splitlines()
    place = np.arange(16 * 24).reshape(16, 24)
    for step in range(STEPS):
        x = (place * 37 + step * 11) % 64 / np.float32(32) - np.float32(1)
        loss = trainer.step({"x": x.astype(np.float32), "y": (np.arange(16) + step) % 4})
    same_bits(safetensors.encode(trainer.state), end.read_bytes())
    assert (len(said), said[-1]) == (STEPS, f"step {STEPS}  loss {loss:g}")
    assert [*home.iterdir()] == [], "onnxruntime writes to the user's folders"
    trainer.set_state(safetensors.decode(end.read_bytes()).tensors)


def test_it_says_what_is_wrong(train: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(bytes(8))
    with pytest.raises(subprocess.CalledProcessError) as failed:
        train(tmp_path, tmp_path / "none.onnx", tmp_path / "empty", 1, tmp_path / "end")
    assert "none.onnx" in failed.value.stderr
