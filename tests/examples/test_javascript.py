"""The JavaScript trainer in Node and in Chromium, beside Python's.

Skipped, with the reason, where Node, its packages (`npm ci` in examples/javascript) or Chromium are
missing or do not work.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import device_sdk
import export
from device_sdk.artifact import safetensors
from device_sdk.runtime.step import step_seed
from examples.javascript import compare
from examples.javascript.chromium import ChromiumError, Page
from examples.javascript.compare import ARTIFACTS, ROWS, SEED, Work, difference, in_python
from tests.examples.same_bits import MOST_BY_VERSIONS, same_bits
from tests.fakes.waiting import wait_until

MOST_IN_A_BROWSER = 1e-5
"""WebAssembly's kernels add in another order."""
ONCE_THROUGH = compare.BATCHES
"""Steps after which the rows begin anew."""
MF = Path(device_sdk.__file__).parent / "artifacts" / "mf"
DIGITS = Path(device_sdk.__file__).parent / "artifacts" / "digits"

_PROBE = """
import ort from "onnxruntime-node";
console.log(process.versions.node, typeof ort.InferenceSession.create);
"""
_SNIPPET = """
import { readFile, writeFile } from "node:fs/promises";
import path from "node:path";
import ort from "onnxruntime-node";
import { Table } from "./table.js";
import { decode } from "./safetensors.js";
import { NonFiniteStep, stepSeed, Trainer } from "./tessera-trainer.js";

const [folder, ...more] = process.argv.slice(1);
const open = (options, of = folder) => (
  Trainer.open(ort, (name) => readFile(path.join(of, name)), options));
const says = (work) => Promise.resolve().then(work).then(() => "nothing", (error) => error.message);
const floats = (values, ...dims) => ({ data: Float32Array.from(values), dims });
const ints = (values, ...dims) => ({ data: BigInt64Array.from(values, BigInt), dims });
"""


@pytest.fixture(scope="session")
def node() -> Callable[..., Any]:
    """Runs a snippet with a folder in Node, and gives what it logs, as JSON."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not (compare.HERE / "node_modules" / "onnxruntime-node").exists():
        pytest.skip("no onnxruntime-node: run npm ci in examples/javascript")
    try:
        version, kind = compare.run("node", "--input-type=module", "--eval", _PROBE).split()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"onnxruntime-node does not load: {error}")
    if kind != "function" or int(version.partition(".")[0]) < 20:
        pytest.skip(f"node {version} is too old: 20.11 is needed")

    def snippet(code: str, *arguments: Path) -> Any:
        given = ["--input-type=module", "--eval", _SNIPPET + code, *map(str, arguments)]
        try:
            return json.loads(compare.run("node", *given))
        except subprocess.CalledProcessError as error:
            pytest.fail(error.stderr)

    return snippet


@pytest.fixture(scope="session")
def page(node: Callable[..., Any]) -> Iterator[Page]:
    """A page in a Chromium that starts, and shows something."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")
    if not (compare.HERE / "node_modules" / "onnxruntime-web").exists():
        pytest.skip("no onnxruntime-web: run npm ci in examples/javascript")
    try:
        browser = Page(program)
    except (OSError, ChromiumError) as error:
        pytest.skip(f"chromium does not start: {error}")
    with browser:
        yield browser


@pytest.fixture(scope="session")
def works(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Work]:
    """Artifacts by their names, each exported once."""
    return cache(lambda name: compare.make(name, tmp_path_factory.mktemp("work")))


@pytest.fixture
def small(works: Callable[[str], Work]) -> Work:
    """The smallest of them."""
    return works("MLP, dropout, Adam")


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARTIFACTS)
def test_node_trains_as_python_does_bit_by_bit(
    name: str, node: Callable[..., Any], works: Callable[[str], Work]
) -> None:
    work = works(name)
    ours, theirs = in_python(work), compare.in_node(work)
    same_bits(ours, theirs)
    assert ours == theirs, "the files differ beside their tensors"


@pytest.mark.parametrize("name", ["MLP, dropout, Adam", "CNN, batch norm, SGD with momentum"])
def test_a_page_trains_as_python_does(name: str, page: Page, works: Callable[[str], Work]) -> None:
    work = works(name)
    try:
        found = compare.in_chromium(page, work)
    except ChromiumError as error:
        pytest.skip(f"chromium does not go on: {error}")
    assert difference(in_python(work), found) <= MOST_IN_A_BROWSER


def test_the_page_is_used_by_its_buttons(page: Page, small: Work) -> None:
    try:
        with compare.served(small) as url:
            page.open(url)
            page.evaluate("import('/page.js').then(() => 0)")
            told = page.evaluate("document.body.innerText")
            assert f"on {ROWS * compare.BATCHES} rows that stay on this machine" in told
            page.evaluate("document.getElementById('train').click()")
            wait_until(lambda: "Step 200: loss" in page.evaluate("document.body.innerText"))
            points = page.evaluate("document.getElementById('loss').getAttribute('points')")
            assert len(points.split()) == 200
            page.evaluate("document.getElementById('size').value = 0")
            page.evaluate("document.getElementById('form').dispatchEvent(new Event('submit'))")
            wait_until(lambda: "empty" in page.evaluate("document.body.innerText"))
            fetched = page.evaluate(
                "Promise.all(['/artifact/%2e%2e%2frows.json', '/artifact/none', '/data'].map("
                "  (each) => fetch(each).then((response) => response.status)))"
            )
            assert fetched == [404, 404, 200]
    except ChromiumError as error:
        pytest.skip(f"chromium does not go on: {error}")


def test_a_large_model_whose_step_writes_in_place(node: Callable[..., Any], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1200, 1200), nn.ReLU(), nn.Linear(1200, 4))
    compare.export_classes(model, torch.randn(2, 1200), export.Adam(lr=1e-3), tmp_path / "artifact")
    manifest = json.loads((tmp_path / "artifact" / "manifest.json").read_text())
    assert any(tensor.get("in_place") for tensor in manifest["state"])
    trainer = device_sdk.Trainer(tmp_path / "artifact", providers="cpu", threads=1)
    x = (np.arange(2400, dtype=np.float32) % 7).reshape(2, 1200)
    for _ in range(3):
        trainer.step({"x": x, "y": np.array([1, 3])})
    trainer.save(tmp_path / "python.state")
    node(
        """
        const trainer = await open();
        const x = floats(Array.from({ length: 2400 }, (_, i) => i % 7), 2, 1200);
        for (let i = 0; i < 3; i += 1) await trainer.step({ x, y: ints([1, 3], 2) });
        await writeFile(more[0], await trainer.state());
        console.log(0);
        """,
        tmp_path / "artifact",
        tmp_path / "node.state",
    )
    files = (tmp_path / name for name in ("python.state", "node.state"))
    same_bits(*(file.read_bytes() for file in files))


def test_seeds_of_steps_are_pythons(node: Callable[..., Any], small: Work) -> None:
    pairs = [(0, 0), (7, 1), (-3, 12), (2**70, 10**9)]
    asked = ", ".join(f"stepSeed({seed}n, {step}n)" for seed, step in pairs)
    found = node(f"console.log(JSON.stringify([{asked}].map(String)))", small.folder)
    assert found == [str(step_seed(*pair)) for pair in pairs]


def test_predictions_are_pythons(node: Callable[..., Any], small: Work) -> None:
    x = np.linspace(-1, 1, 48, dtype=np.float32).reshape(2, 24)
    wanted = device_sdk.Trainer(small.folder, providers="cpu").predict({"x": x})["logits"]
    found = node(
        """
        const trainer = await open();
        const x = floats(JSON.parse(more[0]), 2, 24);
        const { logits } = await trainer.predict({ x, y: ints([0, 1], 2) });
        console.log(JSON.stringify([logits.dims, Array.from(logits.data)]));
        """,
        small.folder,
        json.dumps(x.ravel().tolist()),
    )
    assert found[0] == [2, 4]
    assert np.abs(np.array(found[1]) - wanted.ravel()).max() <= MOST_BY_VERSIONS


# -- state in and out ------------------------------------------------------------------------------


def test_a_run_goes_on_in_the_other_language(
    node: Callable[..., Any], small: Work, tmp_path: Path
) -> None:
    half = tmp_path / "half.state"
    half.write_bytes(in_python(small, ONCE_THROUGH))
    onward = tmp_path / "onward.state"
    options = [f"--steps={ONCE_THROUGH}", f"--from={half}", f"--state={onward}"]
    compare.run("node", "node.js", str(small.folder), str(small.rows), *options)
    same_bits(in_python(small, 2 * ONCE_THROUGH), onward.read_bytes())
    trainer = device_sdk.Trainer(small.folder, providers="cpu")
    trainer.restore(onward)
    assert (trainer.step_count, trainer.seed) == (2 * ONCE_THROUGH, SEED)


def test_a_model_by_torchs_names_goes_both_ways(
    node: Callable[..., Any], small: Work, tmp_path: Path
) -> None:
    trainer = device_sdk.Trainer(small.folder, providers="cpu")
    theirs = {name: array + 1 for name, array in trainer.parameters.items()}
    given, back = tmp_path / "given.safetensors", tmp_path / "back.safetensors"
    given.write_bytes(safetensors.encode(theirs, {"task": "films"}))
    options = ["--steps=1", "--lr=1e-30", f"--from={given}", f"--model={back}"]
    compare.run("node", "node.js", str(small.folder), str(small.rows), *options)
    found = safetensors.decode(back.read_bytes())
    assert found.metadata == {"artifact": trainer.artifact.id, "step": "1"}
    trainer.set_parameters(found.tensors)
    for name, array in trainer.parameters.items():
        assert np.array_equal(array, theirs[name])


def test_a_catalogue_of_another_length(node: Callable[..., Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = {"users.weight": (3, 4), "items.weight": (30, 4)}
    model = {name: rng.standard_normal(shape, np.float32) for name, shape in sizes.items()}
    (tmp_path / "model").write_bytes(safetensors.encode(model))
    (tmp_path / "part").write_bytes(safetensors.encode({"items.weight": model["items.weight"]}))
    ones = np.ones(2, np.float32)
    ids = {"user": [0, 2], "positive": [1, 29], "negative": [5, 7]}
    trainer = device_sdk.Trainer(MF, providers="cpu")
    ports = trainer.artifact.graphs["train"].select("batch")
    batch = {name: np.array(each) for name, each in ids.items()}
    batch |= {
        p.of: ones if p.shape else np.array(0.1, np.float32) for p in ports if p.of not in ids
    }
    trainer.set_parameters(model)
    trainer.step(batch)
    trainer.save(tmp_path / "python.state")
    (problem,) = node(
        """
        const trainer = await open();
        const [part, model, to, rest] = more;
        const problem = await says(async () => trainer.load(await readFile(part)));
        await trainer.load(await readFile(model));
        const batch = {
          user: ints([0, 2], 2), positive: ints([1, 29], 2), negative: ints([5, 7], 2),
        };
        for (const [name, rank] of JSON.parse(rest)) {
          batch[name] = rank ? floats([1, 1], 2) : floats([0.1]);
        }
        await trainer.step(batch);
        await writeFile(to, await trainer.state());
        console.log(JSON.stringify([problem]));
        """,
        MF,
        tmp_path / "part",
        tmp_path / "model",
        tmp_path / "node.state",
        json.dumps([[p.of, len(p.shape)] for p in ports if p.of not in ids]),
    )
    assert problem == "'users.weight' shares an axis that changes: give it in the same file"
    files = (tmp_path / name for name in ("python.state", "node.state"))
    same_bits(*(file.read_bytes() for file in files))


def test_a_rung_of_a_ladder_trains_once_it_has_its_values(
    node: Callable[..., Any], tmp_path: Path
) -> None:
    rung = DIGITS / "1of16"
    trainer = device_sdk.Trainer(rung, providers="cpu", threads=1)
    trainer.save(tmp_path / "begin.state")
    batch = {"x": np.full((2, 1, 8, 8), 0.5, np.float32), "y": np.array([1, 2])}
    trainer.step(batch)
    trainer.save(tmp_path / "python.state")
    (problem,) = node(
        """
        const trainer = await open();
        const batch = { x: floats(Array(128).fill(0.5), 2, 1, 8, 8), y: ints([1, 2], 2) };
        const problem = await says(() => trainer.step(batch));
        await trainer.load(await readFile(more[0]));
        await trainer.step(batch);
        await writeFile(more[1], await trainer.state());
        console.log(JSON.stringify([problem]));
        """,
        rung,
        tmp_path / "begin.state",
        tmp_path / "node.state",
    )
    assert re.match(r"'.*' has no value: the artifact's files lack it\. Load a model", problem)
    files = (tmp_path / name for name in ("python.state", "node.state"))
    same_bits(*(file.read_bytes() for file in files))


# -- what is refused -------------------------------------------------------------------------------


def test_batches_that_do_not_fit_are_refused_in_words(
    node: Callable[..., Any], small: Work
) -> None:
    found = node(
        """
        const trainer = await open();
        const x = floats(Array(48).fill(0), 2, 24);
        const y = ints([0, 1], 2);
        const before = await trainer.state();
        const said = [];
        for (const batch of [
          { x }, { x, y, z: y }, { x: [1, 2], y },
          { x: { data: new Float64Array(48), dims: [2, 24] }, y },
          { x: floats(Array(48).fill(0), 4, 12), y }, { x: floats([1, 2, 3], 1, 24), y },
          { x, y: ints([1, 2, 3], 3) }, { x: floats([], 0, 24), y: ints([], 0) },
          { x: floats(Array(48).fill(0), 48), y },
        ]) said.push(await says(() => trainer.step(batch)));
        said.push(await says(() => trainer.step({ x, y }, { rate: 1 })));
        said.push(await says(() => trainer.step({ x, y }, { lr: NaN })));
        const two = await Promise.allSettled([trainer.predict({ x }), trainer.predict({ x })]);
        said.push(two[0].status, two[1].reason.message);
        const bad = { x: floats(Array(48).fill(NaN), 2, 24), y };
        const kind = await trainer.step(bad).catch((error) => error instanceof NonFiniteStep);
        said.push(kind === true ? "NonFiniteStep" : `${kind}`);
        const same = Buffer.compare(Buffer.from(before), Buffer.from(await trainer.state())) === 0;
        console.log(JSON.stringify([said, same]));
        """,
        small.folder,
    )
    said, same = found
    expects = "This artifact expects {x: float32[batch, 24], y: int64[batch]}"
    assert all(each.endswith(expects) for each in said[:9])
    assert [each.removeprefix("batch refused: ").partition(". This")[0] for each in said[:9]] == [
        "'y' is missing",
        "'z' is unknown",
        "'x' is no {data, dims}",
        "'x' holds a Float64Array, not Float32Array",
        "'x' is [4, 12], but axis 1 has 24",
        "'x' is [1, 24], with 3 elements",
        "'y' is [3], but axis 'batch' has 2",
        "'x' is [0, 24], which is empty",
        "'x' is [48], not of 2 axes",
    ]
    assert said[9:] == [
        "hyper.rate is 1; finite numbers are taken for: lr",
        "hyper.lr is NaN; finite numbers are taken for: lr",
        "fulfilled",
        "a call has not ended: await it first",
        "NonFiniteStep",
    ]
    assert same


def test_files_that_are_not_the_manifests_are_refused(
    node: Callable[..., Any], small: Work, tmp_path: Path
) -> None:
    changed = shutil.copytree(small.folder, tmp_path / "changed")
    graph = changed / "train.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    state = tmp_path / "python.state"
    state.write_bytes(in_python(small, 1))
    page = tmp_path / "page"
    page.mkdir()
    (page / "manifest.json").write_text("<!doctype html>")
    found = node(
        """
        const trainer = await open();
        const state = new Uint8Array(await readFile(more[1]));
        const other = await open({}, more[2]);
        const torn = state.slice();
        torn[torn.length - 1] ^= 1;
        const unknown = new TextEncoder().encode(JSON.stringify(
          { a: { dtype: "F32", shape: [1], data_offsets: [0, 4] } }));
        const file = new Uint8Array(8 + unknown.length + 4);
        file.set([unknown.length]);
        file.set(unknown, 8);
        console.log(JSON.stringify([
          await says(() => open({}, more[0])),
          await says(() => open({}, more[3])),
          await says(() => open({ id: "0".repeat(64) })),
          await says(() => open({ id: trainer.id })),
          await says(() => trainer.load(torn)),
          await says(() => other.load(state)),
          await says(() => trainer.load(file)),
          await says(() => trainer.load(file.slice(0, -1))),
          await says(() => trainer.load(file.slice(0, 20))),
          await says(() => trainer.load(new Uint8Array(3))),
        ]));
        """,
        small.folder,
        changed,
        state,
        MF,
        page,
    )
    own = device_sdk.Trainer(small.folder, providers="cpu").artifact
    other = device_sdk.Trainer(MF, providers="cpu").artifact
    known = ", ".join(member.name for _, member in own.members())
    assert found[1].startswith("manifest.json is no JSON, so no artifact's: ")
    assert found == [
        "train.onnx is not the file that manifest.json describes",
        found[1],
        f"this artifact's id is {own.id}, expected {'0' * 64}",
        "nothing",
        "the checkpoint is damaged: its SHA-256 is not that of its contents",
        f"the checkpoint is of artifact {own.id}, not of {other.id}",
        f"'a' is unknown; known are {known}",
        "no safetensors file, or damaged: the offsets of 'a' match neither its shape nor the file",
        "no safetensors file, or damaged: cut off inside the header",
        "no safetensors file, or damaged: cut off before the header",
    ]


def test_any_bytes_are_a_file_or_refused(
    node: Callable[..., Any], small: Work, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(True)}
    whole = safetensors.encode(arrays, {"task": "films"})
    heads = [b"null", b"[]", b"3", b'{"a":null}', b'{"a":{"dtype":"F32","shape":3}}', b"{}"]
    heads += [
        b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}',
        b'{"__metadata__":null}',
    ]
    tried = [len(head).to_bytes(8, "little") + head for head in heads]
    for _ in range(400):
        changed = bytearray(whole)
        for place in rng.integers(len(whole), size=rng.integers(1, 4)):
            changed[place] = rng.integers(256)
        tried.append(bytes(changed))
    (tmp_path / "tried").write_text(json.dumps([each.hex() for each in tried]))
    found = node(
        """
        const tried = JSON.parse(await readFile(folder));
        console.log(JSON.stringify(tried.map((hex) => {
          try {
            return Object.fromEntries(Array.from(decode(Buffer.from(hex, "hex")).tensors,
              ([name, { data }]) => [name, Array.from(data, String)]));
          } catch (error) { return error.message; }
        })));
        """,
        tmp_path / "tried",
    )
    taken = [each for each in found if isinstance(each, dict)]
    assert taken[:3] == [{}, {}, {}]  # [], {} and no notes
    assert len(taken) > 20
    refused = [each for each in found if isinstance(each, str)]
    assert all(each.startswith("no safetensors file, or damaged: ") for each in refused), refused


def test_rows_come_from_csv_as_from_json(node: Callable[..., Any], small: Work) -> None:
    found = node(
        """
        const ports = [
          { of: "x", dtype: "float32", shape: ["batch", 2] },
          { of: "y", dtype: "int64", shape: ["batch"] },
        ];
        const axes = { batch: { example: 2 } };
        const told = (table) => [table.rows, table.usual, table.batch(2, 2)];
        const csv = new Table("x.0,x.1,y\\n1,2,0\\n3,4,1\\n5,6,2\\n", ports, axes);
        const json = new Table('{"y": [0, 1, 2], "x": [[1, 2], [3, 4], [5, 6]]}', ports, axes);
        const text = (value) => JSON.stringify(value, (_, each) => (
          ArrayBuffer.isView(each) ? Array.from(each, String) : each));
        console.log(text([told(csv), told(json),
          await says(() => new Table("x.0,x.1\\n1,2\\n", ports, axes)),
          await says(() => new Table('{"y": [0, 1], "x": [1, 2, 3]}', ports, axes)),
          await says(() => new Table('{"y": [0, 1], "x": [1, 2]}', ports, axes))]));
        """,
        small.folder,
    )
    batch = {"x": {"data": ["5", "6", "1", "2"], "dims": [2, 2]}}
    batch["y"] = {"data": ["2", "0"], "dims": [2]}
    assert found == [
        [3, 2, batch],
        [3, 2, batch],
        "the data lacks 'y': int64[batch]",
        "'x' has 3 numbers: they are no rows of [2]",
        "every entry needs as many rows, and one or more; there are 1,2",
    ]


def test_the_readmes_program_runs(node: Callable[..., Any], small: Work, tmp_path: Path) -> None:
    text = (compare.HERE / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```js\n(import .*?)```", text.partition("In a browser")[0], re.DOTALL)
    program = program.replace("artifacts/net", str(small.folder))
    program = re.sub(r'"(net\.\w+)"', lambda file: json.dumps(str(tmp_path / file[1])), program)
    said = compare.run("node", "--input-type=module", "--eval", program).splitlines()
    losses = [float(line) for line in said[:10]]
    assert (losses[9] < losses[0], said[10:]) == (True, ["[ 16, 4 ]"])
    trainer = device_sdk.Trainer(small.folder, providers="cpu")
    trainer.restore(tmp_path / "net.state")
    model = safetensors.decode((tmp_path / "net.safetensors").read_bytes()).tensors
    assert trainer.step_count == 10
    assert all(np.array_equal(array, model[name]) for name, array in trainer.parameters.items())


def test_nothing_is_left_in_the_users_folders(
    node: Callable[..., Any], small: Work, tmp_path: Path
) -> None:
    as_a_user = ["env", "-u", "ORT_DISABLE_TELEMETRY", "-u", "XDG_CACHE_HOME", f"HOME={tmp_path}"]
    compare.run(*as_a_user, "node", "node.js", str(small.folder), str(small.rows), "--steps=1")
    assert [*tmp_path.iterdir()] == []


def test_the_command_says_what_is_wrong(node: Callable[..., Any], small: Work) -> None:
    for arguments, said in (
        ([], "node node.js ARTIFACT DATA [options]"),
        ([small.folder, small.rows, "--steps=none"], "--steps none: expected a positive number"),
        ([small.folder.parent, small.rows], "no such file or directory"),
    ):
        with pytest.raises(subprocess.CalledProcessError) as failed:
            compare.run("node", "node.js", *map(str, arguments))
        assert said in failed.value.stderr
        assert failed.value.stderr.startswith("node.js: ")


# -- what must not hang ----------------------------------------------------------------------------


def test_a_node_without_end_is_ended(
    node: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "SECONDS", 0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        compare.run("node", "--eval", "setInterval(() => 0, 1000)")


@pytest.mark.parametrize(
    ("does", "said"), [("exec sleep 3600", "no answer within 0.5 s"), ("exit 1", "ended by itself")]
)
def test_a_chromium_that_does_not_work_is_ended(does: str, said: str, tmp_path: Path) -> None:
    program = tmp_path / "chromium"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o700)
    with pytest.raises(ChromiumError, match=said):
        Page(str(program), seconds=0.5)
