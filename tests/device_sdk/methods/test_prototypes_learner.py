from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

import device_sdk
import export
from aggregator.methods.prototypes import PrototypesMethod, PrototypesSettings
from benchmarks.simulation import Simulation
from device_sdk.local_data import LocalData
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.prototypes.contract import (
    PrototypesTraining,
    decode_prototypes,
    encode_prototypes,
)
from device_sdk.methods.prototypes.learner import PrototypesLearner
from device_sdk.wire.arrays.exchange import Broadcast, Update, decode_update, encode_update
from device_sdk.wire.arrays.tensors import Codec
from export.losses import example_prototypes, prototype_alignment
from export.models.prototypes import EmbeddingClassifier
from tests.fakes.handmade import linear_artifact
from tests.fakes.labelled import CLASSES, FEATURES, frozen, samples, unfit

WIDTH = 5
FAST = PrototypesTraining(CLASSES, WIDTH, epochs=1, batch_size=8, learning_rate=0.2)


def network(hidden: int) -> EmbeddingClassifier:
    torch.manual_seed(hidden)
    encoder = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, WIDTH)
    )
    return EmbeddingClassifier(encoder, WIDTH, CLASSES)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two devices' models: another number of hidden units each, one width of embeddings."""
    folders = []
    for hidden in (2, 7):
        folder = tmp_path_factory.mktemp("models") / f"hidden{hidden}"
        export.train_step(
            network(hidden),
            prototype_alignment(lambda model, batch: model(batch["x"])),
            {
                "x": torch.randn(5, FEATURES),
                "label": torch.tensor([0, 1, 2, 0, 1]),
                **example_prototypes(CLASSES, WIDTH),
            },
            optimizer=export.Sgd(lr=0.1),
            dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
            predict=lambda m, b: {
                "embedding": m(b["x"])[0],
                "probabilities": torch.softmax(m(b["x"])[1], -1),
            },
            directory=folder,
            verify=False,
        )
        folders.append(folder)
    return folders


def learner(folder: Path, data: LocalData, seed: int = 0) -> PrototypesLearner:
    trainer = device_sdk.Trainer(folder, providers="cpu")
    return PrototypesLearner(lambda: data, trainer, "", np.random.default_rng(seed))


def method(training: PrototypesTraining = FAST, **chosen: Any) -> PrototypesMethod:
    return PrototypesMethod(PrototypesSettings(training, **chosen), np.random.default_rng(0))


def test_a_prototype_is_the_mean_embedding_of_a_label_after_the_round(
    artifacts: list[Path],
) -> None:
    data = samples(30, 3, labels=(0, 2))
    one = learner(artifacts[0], data)
    found = decode_prototypes(one.train(method().open_round(1)).tensors, FAST)
    embedding = one.trainer.predict({"x": data.train["x"]})["embedding"]
    label = data.train["label"]
    assert found.labels.tolist() == [0, 2]
    assert found.counts.tolist() == [np.sum(label == 0), np.sum(label == 2)]
    for row, wanted in enumerate((0, 2)):
        np.testing.assert_allclose(
            found.means[row], embedding[label == wanted].mean(0), rtol=1e-5, atol=1e-6
        )
    assert (one.report.steps, one.report.samples) == (4, 30)


def test_a_round_is_what_torch_makes_of_it(artifacts: list[Path]) -> None:
    """Two devices in round 1, then the first one's round 2: towards the mean of both."""
    told = replace(FAST, batch_size=64, epochs=3, pull=2.0)
    server, data = method(told), samples(24, 1, labels=(0, 1))
    one, two = learner(artifacts[0], data), learner(artifacts[1], samples(20, 2, labels=(1, 2)))
    broadcast = server.open_round(1)
    sent = [each.train(broadcast) for each in (one, two)]
    for update in sent:
        server.check(update)
        server.absorb(update)
    assert server.close_round().participants == 2
    tables = np.zeros((2, CLASSES, WIDTH))
    for table, update in zip(tables, sent, strict=True):
        table[update.tensors["labels"]] = update.tensors["prototypes"]
    wanted = tables.sum(0) / np.asarray([1, 2, 1])[:, None]
    np.testing.assert_allclose(server.prototypes, wanted, rtol=1e-6)

    twin = network(2).double()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(torch.from_numpy(one.trainer.parameters[name]))
    x, y = (torch.tensor(data.train[name]) for name in ("x", "label"))
    x = x.double()
    optimizer = torch.optim.SGD(twin.parameters(), lr=told.learning_rate)
    for _ in range(told.epochs):
        embedding, logits = twin(x)
        near = torch.nn.functional.mse_loss(embedding, torch.from_numpy(wanted)[y])
        loss = torch.nn.functional.cross_entropy(logits, y) + told.pull * near
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    one.train(server.open_round(2))
    for name, parameter in twin.named_parameters():
        found = one.trainer.parameters[name]
        np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=2e-4, atol=2e-5)


def test_labels_without_prototype_train_by_their_labels_alone(artifacts: list[Path]) -> None:
    data = samples(24, 1)
    found = []
    for pull in (0.0, 1e3):
        one = learner(artifacts[0], data)
        one.train(method(replace(FAST, pull=pull)).open_round(1))
        found.append(one.trainer.parameters)
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name])


@pytest.mark.parametrize("trained", [False, True])
def test_unequal_models_come_to_embed_alike(artifacts: list[Path], trained: bool) -> None:
    data, apart = samples(200, 99).train, []
    for pull in (0.0, 3.0):
        learners = [learner(artifacts[i % 2], samples(40, i), seed=i) for i in range(3)]
        server = method(replace(FAST, epochs=4, pull=pull), trained=trained)
        run = Simulation(server, learners, np.random.default_rng(0))
        for _ in range(10):
            run.round()
        assert not run.failures
        each = [one.trainer.predict({"x": data["x"]}) for one in learners]
        gaps = np.linalg.norm(each[0]["embedding"] - each[1]["embedding"], axis=1)
        apart.append(float(gaps.mean()))
        for told in each:
            assert np.mean(told["probabilities"].argmax(1) == data["label"]) > 0.75
    assert apart[1] < 0.5 * apart[0]


def test_a_restored_learner_continues_bit_for_bit(artifacts: list[Path]) -> None:
    server = method()
    one = learner(artifacts[0], samples(24, 1))
    server.absorb(one.train(server.open_round(1)))
    server.close_round()
    two = learner(artifacts[0], samples(24, 1), seed=7)
    two.restore(one.state())
    assert frozen(two) == frozen(one)
    for name in one.state():
        with pytest.raises(LearnerError):
            two.restore({key: array for key, array in one.state().items() if key != name})
    assert frozen(two) == frozen(one)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (LocalData({"x": np.zeros((2, 4), np.float32)}), "'label' is missing"),
        (unfit([0, 3]), "below the task's 3 classes"),
        (unfit([0, 1], np.nan), "training failed"),
    ],
)
def test_data_that_do_not_fit_change_nothing(
    artifacts: list[Path], data: LocalData, words: str
) -> None:
    one = learner(artifacts[0], data)
    before = frozen(one)
    with pytest.raises(LearnerError, match=words):
        one.train(method().open_round(1))
    assert frozen(one) == before


def test_a_device_without_samples_or_a_label_says_so(artifacts: list[Path]) -> None:
    update = learner(artifacts[0], LocalData({})).train(method().open_round(1))
    assert [len(array) for array in update.tensors.values()] == [0, 0, 0]
    server = method()
    server.open_round(1)
    server.check(update)
    server.absorb(update)
    assert server.close_round().metrics["labels"] == 0


def _broadcast(**changes: Any) -> Broadcast:
    opened = method().open_round(1)
    return Broadcast(1, 0, {**opened.tensors, **changes}, opened.settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prototypes": np.zeros((2, WIDTH), np.float32)}, "'prototypes' are expected to be"),
        ({"prototypes": np.full((3, WIDTH), np.inf, np.float32)}, "are not finite"),
        ({"devices": np.zeros(3, np.int32)}, "'devices' are expected to be int64"),
    ],
)
def test_a_broadcast_that_does_not_fit_changes_nothing(
    artifacts: list[Path], changes: dict[str, Any], words: str
) -> None:
    one = learner(artifacts[0], samples(10, 0))
    before = frozen(one)
    with pytest.raises(LearnerError, match=words):
        one.train(_broadcast(**changes))
    assert frozen(one) == before


def test_models_of_another_loss_or_width_are_refused(artifacts: list[Path], tmp_path: Path) -> None:
    linear_artifact(tmp_path / "linear")
    with pytest.raises(ValueError, match="takes no 'prototype': export it with"):
        learner(tmp_path / "linear", samples(10, 0))
    one = learner(artifacts[0], samples(10, 0))
    with pytest.raises(LearnerError, match="training failed"):
        one.train(method(replace(FAST, width=WIDTH + 1)).open_round(1))


# What travels.


@given(
    st.integers(2, 9).flatmap(
        lambda classes: st.tuples(
            st.just(classes),
            st.sets(st.integers(0, classes - 1)).map(sorted),
            st.integers(1, 6),
            st.sampled_from([Codec.FLOAT32, Codec.FLOAT16, Codec.INT8]),
        )
    ),
    st.data(),
)
def test_prototypes_survive_every_codec(
    told: tuple[int, list[int], int, Codec], data: st.DataObject
) -> None:
    classes, labels, width, codec = told
    means = data.draw(
        hnp.arrays(
            np.float32, (len(labels), width), elements=st.floats(-(2.0**39), 2.0**39, width=32)
        )
    )
    counts = data.draw(hnp.arrays(np.int64, len(labels), elements=st.integers(1, 2**40)))
    knowledge = LabelKnowledge(np.asarray(labels, np.int64), counts, means)
    update = Update(1, encode_prototypes(knowledge))
    body = encode_update(update, codec, np.random.default_rng(0))
    training = PrototypesTraining(classes, width)
    found = decode_prototypes(decode_update(body, 1).tensors, training)
    assert found.labels.tolist() == labels
    np.testing.assert_array_equal(found.counts, np.minimum(counts, 2**31 - 1))
    room = {Codec.FLOAT32: 0.0, Codec.FLOAT16: 1e-3, Codec.INT8: 0.02}[codec]
    largest = np.abs(means).max(axis=1, keepdims=True, initial=0)
    assert (np.abs(found.means - means) <= room * largest + 1e-6 * (room > 0)).all()


@given(
    st.dictionaries(
        st.sampled_from(["labels", "counts", "prototypes", "more"]),
        hnp.arrays(
            st.sampled_from([np.uint16, np.int32, np.float16, np.float32]),
            hnp.array_shapes(min_dims=0, max_dims=2, max_side=3),
        ),
        min_size=2,
    )
)
def test_any_tensors_are_prototypes_or_a_value_error(tensors: dict[str, NDArray[Any]]) -> None:
    try:
        found = decode_prototypes(tensors, PrototypesTraining(3, 2))
    except ValueError:
        return
    assert found.means.shape == (len(found.labels), 2) == (len(found.counts), 2)
    assert np.isfinite(found.means).all() and (np.diff(found.labels) > 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -9.5e11])
def test_values_that_no_codec_carries_are_refused(value: float) -> None:
    knowledge = LabelKnowledge(np.array([0]), np.array([1]), np.full((1, 2), value, np.float32))
    with pytest.raises(ValueError, match="not finite or above 9e"):
        encode_prototypes(knowledge)


def test_tables_that_fit_no_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="classes times width is 131,072,000; expected at most"):
        PrototypesTraining(4000, 32_768)
