"""One model as a ladder of artifacts: each a part of it that trains, proven at export."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import export
from aggregator.methods.fedavg import FedAvgBinding, FedAvgSettings
from device_sdk import Trainer
from device_sdk.artifact import ArtifactError, load_artifact, read_manifest
from device_sdk.artifact.load import rung_folders
from device_sdk.artifact.submodels import FULL_FILE
from device_sdk.capability.rungs import RungRequest, bench_artifacts
from device_sdk.home.home import Home
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.contract import FedAvgTraining, rung_name
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import Declined
from device_sdk.train.arrays import ArrayTrainer
from export import ExportError
from tests.fakes.jobs import artifact_in, job_of
from tests.fakes.step_clock import StepClock
from tests.fakes.waiting import NEVER_SECONDS
from tests.fakes.worlds import world_of

ROWS = 4


class Net(nn.Module):
    """A picture of 8 x 8, a word and a hidden layer: one layer of each kind that is factored."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.conv = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.words = nn.Embedding(40, 2 * width)
        self.hidden = nn.Linear(32 * width + 2 * width, 2 * width)
        self.head = nn.Linear(2 * width, 3)

    def forward(self, picture: Tensor, word: Tensor) -> Tensor:
        seen = functional.relu(self.conv(functional.relu(self.stem(picture)))).flatten(1)
        both = torch.cat([seen, self.words(word)], dim=1)
        found: Tensor = self.head(functional.relu(self.hidden(both)))
        return found


class Flat(Net):
    """Without the word: what follows the flattened channels is theirs alone."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.hidden = nn.Linear(32 * width, 2 * width)

    def forward(self, picture: Tensor, word: Tensor) -> Tensor:
        seen = functional.relu(self.conv(functional.relu(self.stem(picture)))).flatten(1)
        found: Tensor = self.head(functional.relu(self.hidden(seen)))
        return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["picture"], batch["word"])
    return functional.cross_entropy(logits, batch["label"]), {"logits": logits}


def example() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "picture": torch.rand(ROWS, 1, 8, 8, generator=g),
        "word": torch.randint(40, (ROWS,), generator=g),
        "label": torch.randint(3, (ROWS,), generator=g),
    }


def written(model: Any, folder: Path, **chosen: Any) -> list[export.Exported]:
    given: dict[str, Any] = {
        "optimizer": export.Sgd(lr=0.1),
        "dynamic": {name: {0: "batch"} for name in example()},
        "metrics": {"accuracy": ("logits", "label")},
        "verify": False,
    }
    return export.submodels(model, loss, example(), directory=folder, **{**given, **chosen})


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ladders") / "net"
    torch.manual_seed(3)
    written(Net(), folder, ranks=(1 / 8, 1 / 2, 1), verify=True)
    return folder


def test_a_ladder_is_a_folder_of_rising_rungs_around_one_set_of_values(ladder: Path) -> None:
    assert {each.name for each in ladder.iterdir()} == {"1of8", "1of2", "full", FULL_FILE}
    rungs = rung_folders(ladder)
    assert [each.name for each in rungs] == ["1of8", "1of2", "full"]
    artifacts = [load_artifact(each) for each in rungs]
    sizes = [sum(array.size for array in each.initial.values()) for each in artifacts]
    assert sizes == sorted(sizes)
    small = artifacts[0].initial
    assert {name: array.shape for name, array in small.items()} == {
        "stem.weight": (16, 1, 3, 3),  # its shorter side is 9: it stays whole
        "stem.bias": (16,),
        "conv.factors.weight.left": (32, 4),
        "conv.factors.weight.scale": (4,),
        "conv.factors.weight.right": (4, 144),
        "conv.bias": (32,),
        "words.factors.weight.left": (40, 4),
        "words.factors.weight.scale": (4,),
        "words.factors.weight.right": (4, 32),
        "hidden.factors.weight.left": (32, 4),
        "hidden.factors.weight.scale": (4,),
        "hidden.factors.weight.right": (4, 544),
        "hidden.bias": (32,),
        "head.weight": (3, 32),  # likewise, of 3
        "head.bias": (3,),
    }
    assert rung_folders(rungs[0]) == [rungs[0]]


def test_a_ladder_s_folder_taken_for_an_artifact_is_told_from_its_rungs(ladder: Path) -> None:
    with pytest.raises(ArtifactError, match=r"ladder's folder; .*: 1of2, 1of8, full"):
        Trainer(ladder)


def test_two_folders_of_one_rung_are_no_ladder(ladder: Path, tmp_path: Path) -> None:
    shutil.copytree(ladder, tmp_path / "net")
    shutil.copytree(ladder / "1of2", tmp_path / "net/1of2 (copy)")
    with pytest.raises(ArtifactError, match=r"1of2.* are both rung 2: remove one"):
        rung_folders(tmp_path / "net")


def test_a_ladder_is_benched_rung_by_rung_and_one_is_chosen(ladder: Path) -> None:
    request = RungRequest(time_box_seconds=0.1, deadline_seconds=NEVER_SECONDS, samples=20)
    found = bench_artifacts([ladder], request, providers="cpu", memory_of=lambda *artifact: None)
    assert found.kind == "rung"
    assert [row.option for row in found.rows] == ["1of8", "1of2", "full"]
    for told in ("numbers", "down_bytes", "up_bytes"):
        sizes = [getattr(row, told) for row in found.rows]
        assert sizes == sorted(sizes) and sizes[0] > 0
    assert found.choice is not None and found.choice.option == "full" and found.choice.confirmed


def test_a_device_fetches_graphs_without_values_and_has_stand_ins_for_them(
    ladder: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "1of2"
    elsewhere.mkdir()
    for each in (ladder / "1of2").iterdir():
        (elsewhere / each.name).write_bytes(each.read_bytes())
    assert (elsewhere / "initial.safetensors").stat().st_size < 100
    alone, beside = load_artifact(elsewhere), load_artifact(ladder / "1of2")
    assert alone.manifest.id == beside.manifest.id
    for name, array in alone.initial.items():
        assert array.shape == beside.initial[name].shape
        assert array.min() > 0, name
    trainer = Trainer(elsewhere, providers="cpu")
    batch = {name: each.numpy() for name, each in example().items()}
    assert np.isfinite(trainer.step(batch))


def test_every_rung_trains_and_the_smaller_ones_begin_near_the_full_one(ladder: Path) -> None:
    batch = {name: each.numpy() for name, each in example().items()}
    logits = []
    for folder in rung_folders(ladder):
        trainer = Trainer(folder, providers="cpu")
        logits.append(trainer.predict(batch)["logits"])
        before = trainer.step(batch)
        for _ in range(5):
            after = trainer.step(batch)
        assert after < before
    far, near = (float(np.abs(each - logits[2]).max()) for each in logits[:2])
    assert near < far


def test_another_model_s_values_beside_a_rung_are_refused(ladder: Path, tmp_path: Path) -> None:
    for name in (
        "1of2/manifest.json",
        *(f"1of2/{f}" for f in read_manifest(ladder / "1of2").files),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ladder / name).read_bytes())
    (tmp_path / FULL_FILE).write_bytes((ladder / FULL_FILE).read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(ArtifactError, match="not of the model"):
        load_artifact(tmp_path / "1of2")


def test_slices_are_the_first_rows_of_the_full_model(tmp_path: Path) -> None:
    written(Flat, tmp_path / "net", widths=(4, 8, 16))
    full = load_artifact(tmp_path / "net/width-16").initial
    small = load_artifact(tmp_path / "net/width-4").initial
    np.testing.assert_array_equal(small["conv.weight"], full["conv.weight"][:8, :4])
    np.testing.assert_array_equal(small["hidden.weight"], full["hidden.weight"][:8, :128])


class Recurrent(nn.Module):
    """Gates below one another, of which each is cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(x)[0][:, -1])
        return found


def test_of_an_lstm_each_gate_is_cut(tmp_path: Path) -> None:
    batch = {"x": torch.rand(ROWS, 5, 3), "y": torch.zeros(ROWS, 2)}

    def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(model(batch["x"]), batch["y"])

    found = export.submodels(
        Recurrent, squared, batch, widths=(2, 6), optimizer=export.Sgd(lr=0.1), verify=False,
        dynamic={"x": {0: "batch"}, "y": {0: "batch"}}, directory=tmp_path / "net",
    )  # fmt: skip
    piece = found[0].manifest.submodel.pieces["lstm.weight_ih_l0"]
    assert piece.blocks == (4, 1)
    full = load_artifact(tmp_path / "net/width-6").initial["lstm.weight_ih_l0"]
    small = load_artifact(tmp_path / "net/width-2").initial["lstm.weight_ih_l0"]
    np.testing.assert_array_equal(small, full[[0, 1, 6, 7, 12, 13, 18, 19]])


class Normed(Flat):
    """A norm over the width: of a slice it is another."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Sequential(self.norm, nn.Linear(2 * width, 3))


class Ignores(Net):
    def __init__(self, width: int) -> None:
        super().__init__(16)


class Shallower(Flat):
    """A layer that the full model lacks."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        if width < 8:
            self.more = nn.Linear(2, 2)


class Shrinks(Flat):
    """A layer that is wider where the model is narrower: its slices do not nest."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.odd = nn.Linear(100 - width, 1)


def touches(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    found, outputs = loss(model, batch)
    return found + model.hidden.weight.square().sum(), outputs  # type: ignore[union-attr,operator]


@pytest.mark.parametrize(
    ("model", "chosen", "said"),
    [
        (Net, {"widths": (4, 4)}, "rising"),
        (Net, {}, "either ranks or widths"),
        (Net, {"ranks": (0.5, 1)}, "a torch module"),
        (Net(), {"ranks": (1 / 8, 1 / 2)}, "the last rank is 0.5"),
        (Net(), {"ranks": (0, 1)}, "above 0"),
        (Net(), {"widths": (4, 8)}, "a function that builds the model"),
        (nn.Linear(4, 4), {"ranks": (1 / 2, 1)}, r"the same: no layer \(both sides of 16"),
        (Net(), {"ranks": (0.5, 1), "whole": ("conv", "words", "hidden")}, "no layer"),
        (Net(), {"ranks": (0.5, 1), "whole": ("haed",)}, "'haed', which is no module"),
        (Flat, {"widths": (4, 8), "whole": ("haed",)}, "'haed', which is no module"),
        (Ignores, {"widths": (4, 8)}, "build the same model"),
        (Shallower, {"widths": (4, 16)}, r"make\(4\) has 'more.bias', which make\(16\)"),
        (Shrinks, {"widths": (4, 8)}, r"width-4: 'odd.weight': .* does not lie in"),
        (Net, {"widths": 8}, r"the rungs are 8; .*\(16, 32\)"),
        (Net, {"widths": ("small", "large")}, "rising numbers"),
        (Normed, {"widths": (4, 8)}, "norm"),
        (Net, {"widths": (4, 8)}, "hidden"),  # what it reads is two things beside one another
    ],
)  # fmt: skip
def test_what_is_no_ladder_is_refused_in_words_and_leaves_nothing(
    model: Any, chosen: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=said):
        written(model, tmp_path / "net", **chosen)
    assert not [*tmp_path.iterdir()]


def decays(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    found, outputs = loss(model, batch)
    return found + sum(each.square().sum() for each in model.parameters()), outputs


def test_a_penalty_on_all_parameters_is_told_of_weight_decay(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"the loss of the rung 1of8 .* weight_decay="):
        export.submodels(
            Net(), decays, example(), ranks=(1 / 8, 1), optimizer=export.Sgd(lr=0.1),
            dynamic={name: {0: "batch"} for name in example()}, directory=tmp_path / "net",
        )  # fmt: skip


def test_a_loss_that_reads_a_factored_weight_gets_the_product(tmp_path: Path) -> None:
    names = {name: {0: "batch"} for name in example()}
    export.submodels(
        Net(), touches, example(), optimizer=export.Sgd(lr=0.1), dynamic=names,
        ranks=(1 / 8, 1), directory=tmp_path / "net",
    )  # fmt: skip
    small, full = (Trainer(folder) for folder in rung_folders(tmp_path / "net"))
    left, right = (small.parameters[f"hidden.factors.weight.{each}"] for each in ("left", "right"))
    apart = [
        trainer.step({n: v.numpy() for n, v in example().items()})
        - float((weight.astype(np.float64) ** 2).sum())
        for trainer, weight in ((small, left @ right), (full, full.parameters["hidden.weight"]))
    ]
    assert all(0 < each < 10 for each in apart)  # what is left is a cross-entropy


def test_torch_s_optimizers_are_made_of_each_rung_s_parameters(tmp_path: Path) -> None:
    written(
        Net(), tmp_path / "net", ranks=(1 / 8, 1), optimizer=lambda p: torch.optim.Adam(p, lr=0.01)
    )
    for folder in rung_folders(tmp_path / "net"):
        assert read_manifest(folder).optimizer.name == "adam"


def test_a_ladder_takes_the_place_of_another_and_of_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "net"
    written(Net(), folder, ranks=(1 / 8, 1))
    written(Net(), folder, ranks=(1 / 4, 1))
    assert [each.name for each in rung_folders(folder)] == ["1of4", "full"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="holds other files"):
        written(Net(), tmp_path / "mine", ranks=(1 / 4, 1))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine", "net"]


class Sequence(nn.Module):
    """An RNN and attention over it: their weights go into one call of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(20, 24, batch_first=True)
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.head = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen, _ = self.gru(x)
        found: Tensor = self.head(self.attention(seen, seen, seen, need_weights=False)[0][:, -1])
        return found


def test_the_weights_of_rnns_and_attention_are_factored_too(tmp_path: Path) -> None:
    torch.manual_seed(4)
    batch = {"x": torch.rand(ROWS, 5, 20), "y": torch.rand(ROWS, 2)}

    def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(model(batch["x"]), batch["y"])

    small, full = export.submodels(
        Sequence(), squared, batch, ranks=(1 / 4, 1), optimizer=export.Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}, "y": {0: "batch"}}, directory=tmp_path / "net",
    )  # fmt: skip
    names = {member.name for _, member in small.manifest.members()}
    assert {name for name in names if name.endswith(".left")} == {
        "gru.factors.weight_ih_l0.left",
        "gru.factors.weight_hh_l0.left",
        "attention.factors.in_proj_weight.left",
        "attention.out_proj.factors.weight.left",
    }
    assert not any("factors" in member.name for _, member in full.manifest.members())


class Shared(nn.Module):
    """Layers that lie in two places, and one whose weight is made of others."""

    def __init__(self) -> None:
        super().__init__()
        twice = nn.Linear(32, 32)
        self.steps = nn.ModuleList([nn.Linear(20, 32), twice, twice])
        self.again = nn.Sequential(twice, nn.Tanh())
        self.norm = nn.utils.spectral_norm(nn.Linear(32, 32))
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = torch.tanh(step(x))
        found: Tensor = self.head(self.norm(self.again(x)))
        return found


def test_layers_in_several_places_and_weights_made_of_others_stay_whole(tmp_path: Path) -> None:
    torch.manual_seed(5)
    batch = {"x": torch.rand(ROWS, 20), "y": torch.rand(ROWS, 2)}

    def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(model(batch["x"]), batch["y"])

    small, _ = export.submodels(
        Shared(), squared, batch, ranks=(1 / 4, 1), optimizer=export.Sgd(lr=0.1), verify=False,
        dynamic={"x": {0: "batch"}, "y": {0: "batch"}}, directory=tmp_path / "net",
    )  # fmt: skip
    assert small.manifest.submodel is not None
    assert {piece.of for piece in small.manifest.submodel.pieces.values()} == {"steps.0.weight"}


def test_personal_layers_begin_on_a_device_with_the_model_s_own_values(
    ladder: Path, tmp_path: Path
) -> None:
    artifacts = [load_artifact(each) for each in rung_folders(ladder)]
    training = FedAvgTraining(personal="hidden,head")
    settings = FedAvgSettings(training=training)
    binding = FedAvgBinding("fedavg", settings)
    opened = binding.build(0, np.random.default_rng(0), artifacts).open_round(1)
    for artifact, folder in zip(artifacts, rung_folders(ladder), strict=True):
        shutil.copytree(folder, tmp_path / folder.name)
        trainer = Trainer(tmp_path / folder.name, providers="cpu")
        state, stand_ins = trainer.state, trainer.parameters
        learner = FedAvgLearner(lambda: LocalData({}), trainer, "", np.random.default_rng(0))
        offer = replace(opened, offered=dict.fromkeys(opened.attachments, 1), attachments={})
        wanted = {name: opened.attachments[name] for name in learner.wants(offer)}
        told = replace(opened, attachments=wanted)
        assert learner.adopt(told)
        for name, array in trainer.parameters.items():
            np.testing.assert_allclose(array, artifact.initial[name], atol=1e-6, err_msg=name)
        # Afterwards they are the device's.
        learner.restore({f"trainer.{name}": array for name, array in state.items()})
        assert learner.adopt(told)
        np.testing.assert_array_equal(trainer.parameters["head.bias"], stand_ins["head.bias"])
        assert len(learner.wants(offer)) == 1


def test_a_device_takes_the_largest_rung_that_half_of_its_day_s_bytes_allow(
    ladder: Path, tmp_path: Path
) -> None:
    folders = rung_folders(ladder)
    artifacts = [load_artifact(each) for each in folders]
    binding = FedAvgBinding("fedavg", FedAvgSettings(training=FedAvgTraining(batch_size=ROWS)))
    opened = binding.build(0, np.random.default_rng(0), artifacts).open_round(1)
    sizes = {
        name: sum(array.nbytes for array in each.tensors.values())
        for name, each in opened.attachments.items()
    }
    job = job_of(replace(opened, offered=sizes, attachments={}), [artifact_in(f) for f in folders])
    costs = [
        sizes[rung_name(place)] + 4 * artifact.manifest.moved_numbers
        for place, artifact in enumerate(artifacts, 1)
    ]
    data = LocalData({name: each.numpy() for name, each in example().items()})
    found = []
    for number, day in enumerate((None, 2 * costs[2], 2 * costs[2] - 2, 2 * costs[0], 99)):
        home = Home(tmp_path / str(number), create=True)
        rng, clock = np.random.default_rng(1), StepClock(1e-4)
        given = {"bytes_a_day": day, "capability_seconds": 0.05, "providers": "cpu"}
        world = world_of(home, b"\xab" * 16, rng, clock, lambda: data, **given)
        (wanted,) = ArrayTrainer(world, FedAvgLearner).wants(job)
        found.append(wanted)
        declines = world_of(
            home, b"\xab" * 16, rng, clock, lambda: data, when_none_fits="decline", **given
        )
        if day == 99:
            with pytest.raises(Declined, match=r"bytes_a_day: 1of8 takes .* bytes a round, of 49"):
                ArrayTrainer(declines, FedAvgLearner).wants(job)
        home.close()
    assert found == [rung_name(rung) for rung in (3, 3, 2, 1, 1)]


class Heads(nn.Module):
    """Attention whose heads are all of four features: fewer where it is narrower."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.attention = nn.MultiheadAttention(width, width // 4, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.stem(x)
        found: Tensor = self.head(self.attention(seen, seen, seen, need_weights=False)[0][:, -1])
        return found


class Offset(nn.Module):
    """A constant beside the width: no slice but the first rows is its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.head = nn.Linear(width + 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.stem(x)
        found: Tensor = self.head(torch.cat([torch.ones_like(seen[..., :1]), seen], -1)[:, -1])
        return found


@pytest.mark.parametrize(
    ("make", "widths", "units"),
    [
        (Recurrent, (2, 4, 8), 8),
        (Recurrent, (2, 3), 3),
        (Heads, (4, 8, 16), 4),  # whole heads
        (Offset, (4, 8), 0),
    ],
)
def test_a_ladder_tells_of_how_many_units_a_slice_may_have_any(
    make: Any, widths: tuple[int, ...], units: int, tmp_path: Path
) -> None:
    torch.manual_seed(6)
    batch = {"x": torch.rand(ROWS, 5, 3), "y": torch.rand(ROWS, 2)}

    def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(model(batch["x"]), batch["y"])

    found = export.submodels(
        make, squared, batch, widths=widths, optimizer=export.Sgd(lr=0.1), verify=False,
        dynamic={"x": {0: "batch"}, "y": {0: "batch"}}, directory=tmp_path / "net",
    )  # fmt: skip
    told = [each.manifest.submodel for each in found]
    wanted = [(units, units * width // widths[-1]) for width in widths]
    assert [(each.units, each.kept) for each in told if each is not None] == wanted


def test_units_of_channels_go_through_a_flattening(tmp_path: Path) -> None:
    told = [each.manifest.submodel for each in written(Flat, tmp_path / "net", widths=(4, 16))]
    assert [(each.units, each.kept) for each in told if each is not None] == [(16, 4), (16, 16)]
