"""Data as devices have it, raw and few, in a fleet and in the rehearsal that comes before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import export
from aggregator.cli import main
from aggregator.errors import PacketsTooSmall
from aggregator.methods.fedavg import FedAvgMethod
from aggregator.publish.publisher import packet_words
from aggregator.simulate.devices import DeviceSettings
from aggregator.simulate.fleet import VirtualFleet
from aggregator.simulate.task_rounds import TaskSimulation
from aggregator.task.file import read_task
from device_sdk import LocalData, Trainer, rehearsal
from device_sdk.rehearsal import Case, Finding, cases, made_up, problem_of, sentences, supervise
from device_sdk.trial import TrialLimits
from device_sdk.wire.arrays.tensors import decode_tensors, encode_tensors
from device_sdk.wire.publish.task_messages import BROADCAST_CODECS
from export.cli import main as export_main
from export.losses import PENALTY, distillation, example_teachers
from export.models.mutual import DYNAMIC, mutual_losses
from tests.brokers.fixtures import MakeMosquitto
from tests.fakes.bombs import make_bomb
from tests.fakes.handmade import linear_artifact, linear_parts
from tests.fakes.homes import make_home

FEATURES, CLASSES = 4, 3
X, Y = torch.randn(16, FEATURES), torch.arange(16) % CLASSES
BATCH = {"x": {0: "batch"}, "y": {0: "batch"}}


def classified(model: nn.Module, batch: dict[str, Any]) -> Any:
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits, batch["y"]), {"logits": logits}


def squared(model: nn.Module, batch: dict[str, Any]) -> Any:
    found = model(batch["x"])
    return ((found - batch["y"]) ** 2).mean(), {"prediction": found}


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def write(folder: Path, model: nn.Module, loss: Any = classified, **changed: Any) -> Path:
    given = {"example_batch": {"x": X, "y": Y}, "dynamic": BATCH, "optimizer": export.Sgd(lr=0.1)}
    export.train_step(model, loss, **{**given, **changed}, directory=folder, verify=False)
    return folder


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    write(folder / "norm", with_norm())
    write(folder / "plain", plain())
    line = {"x": X, "y": X[:, :1]}
    write(folder / "line", nn.Linear(FEATURES, 1), squared, example_batch=line)
    norm = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1))
    write(folder / "value", norm, squared, example_batch=line)
    return folder


# Fleets.


def samples(rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(CLASSES, size=rows)
    x = rng.standard_normal((rows, FEATURES)) + 3 * np.eye(CLASSES, FEATURES)[y]
    return {"x": x.astype(np.float32), "y": y.astype(np.int64)}


def pascal(devices: int, rng: np.random.Generator) -> list[LocalData]:
    """Pressure in Pa and a clock in s, never scaled; the rest are numbers of size 1 and 1e-3."""
    found = [samples(64, place) for place in range(devices)]
    for each in found:
        each["x"][:, 0] = 101_325 + 700 * rng.standard_normal(64)
        each["x"][:, 1] = 60_000 + 0.5 * rng.standard_normal(64)
        each["x"][:, 3] = 1e-3 * (1 + rng.random(64))
    return [LocalData(each) for each in found]


def one_left_over(devices: int, rng: np.random.Generator) -> list[LocalData]:
    return [LocalData(samples(rows, rows)) for rows in (17, 33, 1)]


def spoilt(devices: int, rng: np.random.Generator) -> list[LocalData]:
    found = [samples(32, place) for place in range(devices)]
    for each, value in zip(found[2:], (np.nan, np.inf, 1e30), strict=True):
        each["x"][3, 0] = value
    return [LocalData(each) for each in found]


def fleet(
    artifact: Path, folder: Path, data: Callable[..., Any], devices: int, codec: str, quorum: int
) -> TaskSimulation:
    file = folder / "task.toml"
    file.write_text(
        f'[task]\nmethod = "fedavg"\nartifact = "{artifact}"\nupdate_codec = "{codec}"\n'
        f'broadcast_codec = "{codec}"\n[round]\nquorum = {quorum}\n'
        "[fedavg.training]\nbatch_size = 16\nlearning_rate = 0.1\n"
    )
    named = f"{__name__}:{data.__name__}"
    settings = DeviceSettings(read_task(file), named, VirtualFleet(devices, 5))
    return TaskSimulation(settings, settings.make())


@pytest.mark.parametrize("codec", ["float16", "int8", "float32"])
def test_raw_numbers_before_batch_norm_reach_its_statistics(
    artifacts: Path, tmp_path: Path, codec: str
) -> None:
    run = fleet(artifacts / "norm", tmp_path, pascal, 3, codec, 3)
    rounds = list(run.rounds(12))
    assert [each.counted for each in rounds] == [3] * 12 and rounds[-1].next_version == 12
    assert isinstance(run.method, FedAvgMethod)
    mean = run.method.model["0.running_mean"]
    # 48 steps with a momentum of 0.1, from 0.
    wanted = np.array([101_325, 6e4, 1.5e-3]) * 0.994
    np.testing.assert_allclose(mean[[0, 1, 3]], wanted, rtol=0.02)
    assert run.method.model["0.running_var"][1] == pytest.approx(0.25, rel=0.1)
    opened = run.method.open_round(13)
    sent = encode_tensors(
        opened.tensors, BROADCAST_CODECS[codec], np.random.default_rng(0), exact=opened.exact
    )
    np.testing.assert_array_equal(decode_tensors(sent)["b.0.running_mean"], mean)


def test_what_is_left_over_waits_and_who_has_too_little_declines(
    artifacts: Path, tmp_path: Path
) -> None:
    run = fleet(artifacts / "norm", tmp_path, one_left_over, 3, "float16", 2)
    for each in run.rounds(2):
        assert (each.counted, dict(each.failed)) == (2, {"too-few-samples": 1})
        assert each.failure == (
            "device 2: this device has 1 sample to train on; the task's model needs at least 2"
        )
    trainer = Trainer(artifacts / "norm")
    alone = {name: array[:1] for name, array in samples(4, 0).items()}
    assert trainer.predict(alone)["logits"].shape == (1, CLASSES), "one row is predicted from"


def test_numbers_beyond_all_measure_are_told_as_such(artifacts: Path, tmp_path: Path) -> None:
    run = fleet(artifacts / "norm", tmp_path, spoilt, 5, "float16", 2)
    (played,) = run.rounds(1)
    assert (played.counted, dict(played.failed)) == (2, {"not-finite": 3})
    assert isinstance(run.method, FedAvgMethod)
    assert all(np.isfinite(array).all() for array in run.method.model.values())


# The rehearsal.


@pytest.fixture
def home(tmp_path: Path) -> str:
    return str(make_home(tmp_path / "home", "mqtt://127.0.0.1:1").folder)


def task(folder: Path, method: str, artifact: Path, training: str) -> Path:
    file = folder / "rehearsed.toml"
    file.write_text(
        f'[task]\nmethod = "{method}"\nartifact = "{artifact}"\n[{method}.training]\n{training}\n'
    )
    return file


def normed_students(folder: Path) -> Path:
    example = {"x": X, "label": Y, **example_teachers(CLASSES)}
    return write(
        folder / "student",
        with_norm(),
        distillation(lambda model, batch: model(batch["x"])),
        example_batch=example,
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        predict=lambda model, b: {"probabilities": torch.softmax(model(b["x"]), -1)},
        gradient=PENALTY,
    )


def normed_peers(folder: Path) -> Path:
    scalars = ("weight_local", "weight_public", "project", "weight_kl", "weight_ce")
    public = {"x_pub": X[:6] - 1, "y_pub": Y[:6], "confidence": torch.rand(6)}
    teacher = torch.softmax(torch.randn(6, CLASSES), -1)
    switches = {name: torch.tensor(1.0) for name in scalars}
    return write(
        folder / "peer",
        with_norm(),
        mutual_losses,
        example_batch={"x": X, "y": Y, **public, "teacher": teacher, **switches},
        dynamic=DYNAMIC,
        predict=lambda model, b: {"probabilities": torch.softmax(model(b["x"]), -1)},
        gradient=export.ConflictProjection(),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "artifact", "training", "said"),
    [
        (
            "fedavg",
            "norm",
            "",
            [
                "trains: a device with 64 samples; with 33 samples (a batch and one); with 2",
                "with raw 'x', such as a pressure of 101,325 Pa; with raw 'x', such as a clock's",
                "declines (too-few-samples): a device with 1 sample: this device has 1 sample",
                "fails (not-finite): a device with a NaN in 'x'",
                "a device with a label of -1 in 'y'; with a label of 3 in 'y' (0 to 2 train): tr",
                "the loss goes down: ",
                "not checked: the largest packet that the broker mqtt://127.0.0.1:1 takes (nobody",
            ],
        ),
        ("fedavg", "line", "", ["what to do: put batch norm in front of the model, or scale"]),
        (
            "fedavg",
            "value",
            "",
            [
                "fails (not-finite): a device with raw 'y' to learn, such as a pressure",
                "what to do: where devices have such, scale these numbers in the app",
            ],
        ),
        ("teacher_logits", "student", "classes = 3", ["declines (too-few", "missing (-100 in"]),
        ("mutual", "peer", "classes = 3\nlocal_steps = 4", ["trains: a device with 64 samples"]),
    ],
)
def test_a_task_that_works_is_right_and_says_whom_it_fails(
    artifacts: Path,
    tmp_path: Path,
    home: str,
    capsys: pytest.CaptureFixture[str],
    method: str,
    artifact: str,
    training: str,
    said: list[str],
) -> None:
    makers = {"student": normed_students, "peer": normed_peers}
    folder = makers[artifact](tmp_path) if artifact in makers else artifacts / artifact
    file = task(tmp_path, method, folder, training)
    capsys.readouterr()
    assert main(["task", "check", str(file), "--home", home]) == 0
    out = capsys.readouterr().out
    assert f": task rehearsed, {method}: right" in out
    for words in said:
        assert words in out


@pytest.mark.parametrize(
    ("artifact", "training", "said"),
    [
        ("norm", "batch_size = 1", "batches are of 1 samples, and a step of 'norm' takes at least"),
        ("line", "learning_rate = 50.0", "the loss of the same samples rose from"),
        ("fixed", "", "batches are of 32 samples, and a step of 'fixed' takes exactly 8"),
    ],
)
def test_a_task_of_which_no_round_would_succeed_is_wrong(
    artifacts: Path,
    tmp_path: Path,
    home: str,
    capsys: pytest.CaptureFixture[str],
    artifact: str,
    training: str,
    said: str,
) -> None:
    if artifact == "fixed":
        example = {"x": X[:8], "y": Y[:8]}
        write(tmp_path / artifact, plain(), example_batch=example, dynamic={})
    folder = (tmp_path if (tmp_path / artifact).exists() else artifacts) / artifact
    file = task(tmp_path, "fedavg", folder, training)
    capsys.readouterr()
    assert main(["task", "check", str(file), "--home", home, "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert "a rehearsal found that a device with" in found["problem"]
    assert said in found["problem"]


def halves(devices: int, rng: np.random.Generator) -> list[LocalData]:
    x = np.full((5, FEATURES), 0.5, dtype=np.float32)
    return [LocalData({"x": x, "y": np.full(5, 2, dtype=np.int64)})] * devices


def test_own_samples_take_the_place_of_made_up_ones(
    artifacts: Path, tmp_path: Path, home: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = task(tmp_path, "fedavg", artifacts / "plain", "")
    data = ["--data", f"{Path(__file__)}:halves"]
    assert main(["task", "check", str(file), "--home", home, *data]) == 0
    out = capsys.readouterr().out
    assert f"and samples of {data[1]}:" in out
    assert "as many passes as 30 steps take, at the artifact's rate of 0.1 (its author's), " in out
    assert main(["task", "check", str(file), "--home", home, "--data", "nowhere:data"]) == 1
    assert "nowhere cannot be imported" in capsys.readouterr().out


def unread(model: nn.Module, batch: dict[str, Any]) -> Any:
    """Moves its parameters by the decay alone."""
    return (model(batch["x"]) * 0).sum() + batch["x"].square().mean()


def all_frozen() -> nn.Module:
    """But for what its gradient does not reach."""
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    model.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    return model


def of_frozen(model: nn.Module, batch: dict[str, Any]) -> Any:
    loss, outputs = classified(model, batch)
    return loss + 0 * dict(model.named_parameters())["unused"].sum(), outputs


def starred(model: nn.Module, batch: dict[str, Any]) -> Any:
    return classified(model, {"x": batch["x"], "y": batch["y"] - 1})


def standardised(model: nn.Module, batch: dict[str, Any]) -> Any:
    x = batch["x"]
    return classified(model, {"x": (x - x.mean(0)) / x.std(0, correction=0), "y": batch["y"]})


def contrasted(model: nn.Module, batch: dict[str, Any]) -> Any:
    found = model(batch["x"])
    alike = found @ model(batch["x"] + 1).T
    return nn.functional.cross_entropy(alike, torch.arange(len(alike))), {"found": found}


def of_two_classes(model: nn.Module, batch: dict[str, Any]) -> Any:
    """The first output is to be larger where the class is 1."""
    found, positive = model(batch["x"]), (batch["y"] == 1).float()
    negative = 1 - positive
    gap = found[:, 0] @ negative / negative.sum() - found[:, 0] @ positive / positive.sum()
    return nn.functional.softplus(gap), {"logits": found}


FAILING: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "a rate of 0": (plain, {"optimizer": export.Sgd(lr=0.0)}, "no parameter moves in 40 steps: is"),
    "all frozen": (all_frozen, {"loss": of_frozen}, "no parameter moves in 40 steps: is"),
    "a loss of the data alone": (
        plain,
        {"loss": unread, "optimizer": export.Sgd(lr=0.1, weight_decay=0.1)},
        "to the last bit before and after 4 steps, though parameters move",
    ),
    "a rate that explodes": (
        lambda: nn.Linear(FEATURES, 1),
        {"loss": squared, "example_batch": {"x": X, "y": X[:, :1]}, "optimizer": export.Sgd(lr=30)},
        "will go on: is the learning rate too high?",
    ),
    "labels missing": (plain, {}, "fails (not-finite): a device with a label of -1 in 'y'; with"),
    "labels that count from 1": (
        plain,
        {"loss": starred, "example_batch": {"x": X, "y": Y + 1}},
        "a label of 0 in 'y'; with a label of 4 in 'y' (1 to 3 train)",
    ),
    "a constant feature": (
        plain,
        {"loss": standardised},
        "fails (not-finite): a device with zeros alone in 'x'",
    ),
    "one class": (
        plain,
        {"loss": of_two_classes},
        "fails (not-finite): a device with the same 'y' in all samples",
    ),
    "a sample that is held against others": (
        plain,
        {"loss": contrasted},
        "trains (and changes nothing): a device with 1 sample",
    ),
    "a rate that is next to nothing": (
        plain,
        {"optimizer": export.Sgd(lr=1e-7)},
        "the loss hardly changes: ",
    ),
    "batch norm of single rows": (
        with_norm,
        {"example_batch": {"x": X[:2], "y": Y[:2]}},
        "declines (too-few-samples): a device with 1 sample: ",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAILING)
def test_the_rehearsal_of_a_model_that_would_have_failed(name: str, tmp_path: Path) -> None:
    model, given, said = FAILING[name]
    folder = write(tmp_path / "made", model(), **given)
    found = supervise("device_sdk.rehearsal", [str(folder)], TrialLimits(30.0), tmp_path)
    assert found is not None
    assert said in "\n".join([*found.lines, found.problem or ""])
    usual = r"  trains: a device with \d+ samples; with \d+ samples \(a batch and one\)"
    assert any(re.match(usual, line) for line in found.lines) == (found.problem is None)


@pytest.mark.parametrize("loss", ["least-squares", "bpr"])
def test_scatter_is_rehearsed_with_items(
    tmp_path: Path, home: str, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    (tmp_path / "items.tsv").write_text("".join(f"item-{row}\n" for row in range(100)))
    file = tmp_path / "items.toml"
    file.write_text(f'[task]\ncatalogue = "items.tsv"\n[scatter]\nloss = "{loss}"\ncolumns = 4\n')
    capsys.readouterr()
    assert main(["task", "check", str(file), "--home", home]) == 0
    out = capsys.readouterr().out
    assert f"rehearsed scatter ({loss}) with 100 items" in out
    assert "trains: a device with 20 items; with 1 item; with 20 items that the catalogue k" in out
    assert "declines (unknown-items): a device with no item that the catalogue knows: 20 of" in out


def test_the_first_number_that_is_no_class_is_found_wherever_it_lies() -> None:
    """By the sizes of the model's tensors, or between them; and nothing where any number trains."""
    for bound in (2, 3, 5, 100, 333, 70_000):
        for sizes in ({1, bound}, {4, 500}, set()):
            tried: list[int] = []

            def fails(value: int, bound: int = bound, tried: list[int] = tried) -> bool:
                tried.append(value)
                return value >= bound

            assert rehearsal._bound(fails, sizes) == bound
            assert len(tried) < 5 or bound not in sizes
    assert rehearsal._bound(lambda value: False, {3}) is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("limit", "status", "said"),
    [
        ("", 0, "names no largest packet: contents go down in chunks of at most 65,536 bytes"),
        (
            "max_packet_size 20000",
            0,
            "takes packets of at most 20,000 bytes: contents go down in chunks of at most 19,808",
        ),
        ("allow_anonymous false", 0, "not checked: the largest packet that the broker mqtt://"),
        ("max_packet_size 3000", 1, "takes packets of at most 3,000 bytes, and a session needs"),
    ],
)
def test_the_brokers_largest_packet_is_asked_for(
    artifacts: Path,
    tmp_path: Path,
    make_mosquitto: MakeMosquitto,
    capsys: pytest.CaptureFixture[str],
    limit: str,
    status: int,
    said: str,
) -> None:
    usual = [] if limit.startswith("allow") else ["allow_anonymous true"]
    broker = make_mosquitto(*usual, *filter(None, [limit]))
    home = make_home(tmp_path / "home", broker.url).folder
    file = task(tmp_path, "fedavg", artifacts / "plain", "")
    capsys.readouterr()
    assert main(["task", "check", str(file), "--home", str(home)]) == status
    assert said in capsys.readouterr().out


def test_what_names_all_chunks_must_fit_too() -> None:
    with pytest.raises(PacketsTooSmall, match="the task's broadcast has one of"):
        packet_words(8000, {"broadcast": 8000 * 300})
    words = packet_words(8000, {"broadcast": 80_000, "update": 20_000})
    assert words.endswith("a round's 80,000 in 11 chunks, an update's 20,000 up in 3 messages")


def test_an_artifact_that_hangs_ends_the_rehearsal(tmp_path: Path) -> None:
    linear_artifact(tmp_path / "linear")
    bomb = make_bomb("loop", tmp_path / "linear", tmp_path / "bomb")
    found = supervise("device_sdk.rehearsal", [str(bomb)], TrialLimits(1.0), tmp_path)
    assert found is not None and found.problem is None, "a slow machine is no fault of a task's"
    assert "a device with 16 samples did not end within 1 s" in found.lines[0]


def test_cases_have_the_artifacts_entries_and_are_told_apart() -> None:
    manifest = linear_parts()[0]
    rng = np.random.default_rng(0)
    for draw in made_up(manifest, rng):
        for case in cases(manifest, 8, rng, draw):
            assert set(case.data.train) == {"x", "y"}
            assert all(array.dtype == np.float32 for array in case.data.train.values())
    case = Case("17 samples", LocalData({}), usual=True, advice="wait")
    assert problem_of([Finding(case, "trains")]) is None
    found = Finding(case, "fails", "not-finite", "the loss is nan")
    assert sentences([found]) == [
        "fails (not-finite): a device with 17 samples: the loss is nan",
        "  what to do: wait",
    ]


def test_the_desk_rehearses_what_it_has_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import tests.aggregator.simulate.test_rehearsal as t\nimport export\n\n"
        "def model():\n    return dict(model=t.with_norm(), loss=t.classified, "
        "example_batch={'x': t.X, 'y': t.Y}, optimizer=export.Sgd(lr=0.1), dynamic=t.BATCH)\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["build", "mine:model", "-o", "out", "--no-verify", "--quiet"]
    assert export_main(arguments) == 0
    out = capsys.readouterr().out
    assert "declines (too-few-samples): a device with 1 sample" in out
