"""The task file: its template is right, and every slip names its key."""

from __future__ import annotations

import inspect
import re
import shutil
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from aggregator.errors import AggregatorError, TaskError
from aggregator.methods.fedavg import FedAvgBinding, FedAvgSettings
from aggregator.methods.scatter import ScatterTable
from aggregator.task.evaluation import EvaluationSettings
from aggregator.task.file import (
    AdmissionSettings,
    BrokerTable,
    KeySettings,
    MetricsSettings,
    ModelsSettings,
    RoundSettings,
    StoreSettings,
    TaskTable,
    read_catalogue_file,
    read_task,
)
from aggregator.task.template import meanings, task_template
from device_sdk.artifact.submodels import Submodel
from tests.fakes.handmade import linear_artifact, linear_parts

GOOD = '[task]\ncatalogue = "items.tsv"\n'
FEDAVG = '[task]\nmethod = "fedavg"\nartifacts = ["shipped:mf"]\n'


def write(folder: Path, text: str) -> Path:
    (folder / "items.tsv").write_text("a\nb\n")
    (folder / "pw").write_text("secret\n")
    (folder / "raw").write_bytes(b"\xff")
    path = folder / "task.toml"
    path.write_text(text)
    return path


def test_the_template_is_valid_and_states_the_defaults(tmp_path: Path) -> None:
    as_written = read_task(write(tmp_path, task_template()))
    assert as_written.artifacts == ()
    spelt_out = read_task(write(tmp_path, re.sub(r"(?m)^# (?=\w+ = |\[)", "", task_template())))
    usual = EvaluationSettings(("hr10_all", "ndcg10_all", "hr10", "ndcg10"), best_by="hr10_all")
    assert spelt_out == replace(as_written, evaluation=usual)  # a table that is there by itself
    least = '[task]\ncatalogue = "items.tsv"\n'
    assert read_task(write(tmp_path, least)) == as_written


@pytest.mark.parametrize(
    "method", ["fedavg", "teacher_logits", "mutual", "prototypes", "attention"]
)
def test_a_method_on_arrays_has_a_template_of_its_own(tmp_path: Path, method: str) -> None:
    text = task_template(method)
    assert "catalogue" not in text and "items.tsv" not in text and ":class:" not in text
    assert max(map(len, text.splitlines())) <= 100
    for name in ("model", "small", "large"):
        linear_artifact(tmp_path / name, "accuracy")
    as_written = read_task(write(tmp_path, text))
    assert as_written.binding.method_name == method and as_written.evaluation is None
    spelt_out = re.sub(r"(?m)^# (?=\w+ = |\[)", "", text)
    assert read_task(write(tmp_path, spelt_out)).binding == as_written.binding
    kind = type(as_written.binding).settings_class
    assert set(tomllib.loads(spelt_out)[method]) <= {field.name for field in fields(kind)}


def test_the_template_names_every_key_with_its_meaning(tmp_path: Path) -> None:
    every = re.sub(r"(?m)^# (?:e\.g\. )?(?=\w+ = |\[)", "", task_template())
    tables = tomllib.loads(every)
    assert set(tables["task"]) == {field.name for field in fields(TaskTable)} - {
        "artifacts",
        "companions",
    }
    for name, kind in {
        "broker": BrokerTable,
        "round": RoundSettings,
        "scatter": ScatterTable,
        "evaluation": EvaluationSettings,
        "models": ModelsSettings,
        "store": StoreSettings,
        "keys": KeySettings,
        "admission": AdmissionSettings,
        "metrics": MetricsSettings,
    }.items():
        assert set(tables[name]) == {field.name for field in fields(kind)}
    # What is an example and refused by the defaults says so.
    assert "least squares, the default, trains no graph." in task_template()
    assert "trains no graph" not in task_template("fedavg")
    settings = [line for line in task_template().splitlines() if re.search(r"\w = ", line)]
    assert [line for line in settings if not re.search(r" # \w", line)] == []
    assert max(map(len, task_template().splitlines())) <= 100
    for file in ("broker-password", "ca.pem", "client.pem", "client.key"):
        (tmp_path / file).write_text("x")
    task = read_task(write(tmp_path, every.replace("mqtt://", "mqtts://")))
    assert (task.fleet.broker.way.url.user, task.fleet.broker.way.password()) == (
        "tessera-aggregator",
        "x",
    )


def test_meanings_are_read_from_docstrings_of_any_python(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python 3.13 and later keep them without their indentation.
    said = meanings(ScatterTable)
    assert len(said) > 10
    for each in ScatterTable.__mro__[:-1]:
        monkeypatch.setattr(each, "__doc__", inspect.cleandoc(each.__doc__ or ""))
    assert meanings(ScatterTable) == said


def test_a_task_on_arrays_has_no_catalogue_and_its_methods_own_settings(tmp_path: Path) -> None:
    text = FEDAVG + '[fedavg.training]\nepochs = 3\npersonal = "head"\n'
    task = read_task(write(tmp_path, text))
    assert (task.catalogue, len(task.artifacts), task.companions) == (None, 1, ())
    assert isinstance(task.binding, FedAvgBinding)
    settings = task.binding.settings
    assert isinstance(settings, FedAvgSettings)
    assert (settings.training.epochs, settings.training.personal_names) == (3, ("head",))
    assert (settings.optimizer.name, settings.optimizer.learning_rate) == ("plain", 1.0)
    single = read_task(write(tmp_path, FEDAVG.replace('s = ["shipped:mf"]', ' = "shipped:mf"')))
    assert single.artifacts == task.artifacts


def test_a_ladder_s_folder_stands_for_its_rungs_smallest_first(tmp_path: Path) -> None:
    ladder, linear = tmp_path / "net", linear_parts()[0]
    for name, rung in (("one", 1), ("all", 3), ("half", 2)):
        (ladder / name).mkdir(parents=True)
        manifest = replace(linear, submodel=Submodel(rung, 3, "0" * 64))
        (ladder / name / "manifest.json").write_bytes(manifest.to_json())
    (ladder / "full.safetensors").write_bytes(b"")
    text = '[task]\nmethod = "{}"\nartifact = "net"\n'
    task = read_task(write(tmp_path, text.format("fedavg")))
    assert [each.name for each in task.artifacts] == ["one", "half", "all"]
    own = text.format("mutual") + "[mutual.training]\nclasses = 3\n"
    assert read_task(write(tmp_path, own)).artifacts == task.artifacts
    more = own.replace('artifact = "net"', 'artifacts = ["net", "shipped:mf"]')
    several = read_task(write(tmp_path, more)).artifacts
    assert [each.name for each in several] == ["one", "half", "all", "mf"]
    (ladder / "half/manifest.json").write_bytes(linear.to_json())
    with pytest.raises(TaskError, match=r"is no whole ladder: .*half lies in a ladder's folder"):
        read_task(write(tmp_path, text.format("fedavg")))
    (ladder / "full.safetensors").unlink()
    with pytest.raises(TaskError, match=r"whole ladder: full\.safetensors, the full model's"):
        read_task(write(tmp_path, own))
    shutil.rmtree(ladder)
    ladder.mkdir()
    (ladder / "full.safetensors").touch()
    with pytest.raises(TaskError, match=r"is no whole ladder: .*without any rung in it"):
        read_task(write(tmp_path, own))


@pytest.mark.parametrize(("loss", "kept"), [("least-squares", 0), ("bpr", 1)])
def test_an_artifact_that_no_device_trains_is_left_out_and_said(
    loss: str, kept: int, tmp_path: Path
) -> None:
    text = GOOD + f'artifact = "shipped:mf"\n[scatter]\nloss = "{loss}"\n'
    task = read_task(write(tmp_path, text))
    assert len(task.artifacts) == kept
    assert ("task.artifact is without effect" in task.note) == (not kept)


def test_user_and_password_come_from_files(tmp_path: Path) -> None:
    text = GOOD + '[broker]\nurl = "mqtt://h"\nuser = "u"\npassword_file = "pw"\n'
    task = read_task(write(tmp_path, text))
    assert (task.fleet.broker.way.url.user, task.fleet.broker.way.password()) == ("u", "secret")
    assert "secret" not in repr(task)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[task]\n", "task.catalogue is missing"),
        (GOOD + 'method = "magic"\n', "task.method .*no .* offers .*'magic'; there are .*scatter"),
        (
            GOOD + 'warm_start = "task:air"\n',
            "task.warm_start is 'task:air'; expected task:NAME@best",
        ),
        (GOOD + '[cluster]\nchunks = "https://cdn.example"\n', "chunks and chunk_store are given"),
        (
            GOOD + '[cluster]\nchunk_store = "www"\nchunks = "HTTPS://cdn.example"\n',
            "mirror is 'HTTPS://cdn.example'; expected a URL",  # for devices
        ),
        (
            GOOD + f'[cluster]\nchunk_store = "www"\nchunks = "https://cdn.example/{"a" * 500}"\n',
            "mirror is 'https://cdn.example/aaa.*; expected a URL",
        ),
        (GOOD + "[models]\nkeep_last = 0\n", "models.keep_last is 0; expected an integer"),
        (GOOD + 'artifacts = "shipped:mf"\n', "task.artifacts is .*; expected a list, each a text"),
        (GOOD + 'artifact = "a"\nartifacts = ["b"]\n', "task.artifact and task.artifacts"),
        (GOOD + 'artifacts = ["shipped:mf", "shipped:mf"]\n', "lists 2 artifacts; scatter takes 0"),
        (GOOD + 'companions = ["shipped:mf"]\n', "task.companions lists 1; expected one for each"),
        (
            FEDAVG.replace("fedavg", "attention").replace(
                "[task]", '[task]\ncompanions = ["shipped:mf"]'
            ),
            "task.companions are meta-networks, .*attention.training.aggregator_mixes = false",
        ),
        (FEDAVG.replace("s = [", "s = [] # ["), "task.artifacts lists 0 .*; fedavg takes 1"),
        (
            FEDAVG + "[fedavg]\nclip_norm = -1\n",
            "fedavg.clip_norm is -1; expected a number",
        ),
        (FEDAVG + "[fedavg.training]\nepochs = 0.5\n", "fedavg.training.epochs is 0.5"),
        (FEDAVG + '[fedavg.training]\nweighting = "x"\n', "fedavg.training.weighting is 'x'"),
        (FEDAVG + "[fedavg.optimizer]\nmomentum = 1\n", "fedavg.optimizer.momentum is unknown"),
        (FEDAVG.replace("[task]", '[task]\ncatalogue = "items.tsv"'), "fedavg has no items"),
        (GOOD + 'name = "Films!"\n', "task.name is no name"),
        (GOOD + 'artifact = "shipped:nothing"\n', "task.artifact is 'shipped:nothing'"),
        (GOOD + 'update_codec = "int4"\n', "task.update_codec .* float16, float32, int8"),
        (GOOD + "quorm = 1\n", "task.quorm is unknown here"),
        (GOOD + "[round]\nquorum = 0\n", "round.quorum is 0; expected an integer from 1"),
        (GOOD + "[round]\nquorum = true\n", "round.quorum is True"),
        (
            GOOD + "[round]\nshare = 1.5\n",
            "round.share is 1.5; expected .* at most 1",
        ),
        (GOOD + "[round]\nshare = 0\n", "round.share is 0; expected a number above 0"),
        (GOOD + "[round]\ndeadline_seconds = nan\n", "round.deadline_seconds is nan"),
        (
            GOOD + "[round]\ndeadline_seconds = 3\nleast_deadline_seconds = 4\n",
            "round.least_deadline_seconds lies above",
        ),
        (GOOD + '[broker]\nurl = "http://x"\n', "broker.url is not usable"),
        (GOOD + '[broker]\nprefix = "a/#"\n', "broker.prefix is not usable"),
        (GOOD + '[broker]\nca_file = "pw"\n', "broker.ca_file is given, but broker.url starts"),
        (GOOD + '[broker]\npassword_file = "pw"\n', "broker.password_file .* without broker.user"),
        *(
            (
                GOOD + f'[broker]\nuser = "u"\npassword_file = "{name}"\n',
                f"broker.password_file cannot be read: .*{why}",
            )
            for name, why in (("nowhere", "No such file"), (".", "is a folder"), ("raw", "decode"))
        ),
        (
            GOOD + '[broker]\nurl = "mqtts://h"\nkey_file = "pw"\n',
            "broker.key_file is given without broker.certificate_file",
        ),
        (GOOD + "[scatter]\ncolumns = 0\n", "scatter.columns is 0"),
        (GOOD + '[scatter]\naggregator = "sum"\n', "scatter.*aggregator is 'sum'"),
        (GOOD + "[scatter.optimizer]\nbeta1 = 2\n", "scatter.*beta1 is 2"),
        (GOOD + '[scatter.training]\nscores = "x"\n', "scatter.*scores is 'x'"),
        (GOOD + "[scatter.training]\nrate = 1\n", "scatter.training.rate is unknown here"),
        (GOOD + "[scatter]\nclip_norm = 1e13\n", "scatter.clip_norm is 1.*at most 1e.12"),
        (GOOD + f"[scatter]\nclip_norm = {10**400}\n", "scatter.clip_norm is 1000"),
        (GOOD + f"[scatter.training]\nmost_triples = {2**63}\n", "most_triples is .* of 64 bits"),
        (
            GOOD + '[evaluation]\nmetrics = ["hr@10"]\n',
            "evaluation.metrics names 'hr@10', which is no metric; there are loss, .*hr10",
        ),
        (
            GOOD + '[evaluation]\nmetrics = ["accuracy"]\n',
            "evaluation.metrics names 'accuracy'; a method that ranks items has hr10_all, "
            "ndcg10_all, hr10",
        ),
        (
            GOOD + '[evaluation]\nmetrics = ["hr10", "hr10"]\n',
            "evaluation.metrics is not usable: metrics names one of them twice",
        ),
        (GOOD + '[evaluation]\nbest_by = "x"\n', "best_by is not usable: no metric is called 'x'"),
        (
            GOOD + '[evaluation]\nmetrics = ["hr10"]\nbest_by = "hr10_all"\n',
            "best_by is 'hr10_all'; evaluation.metrics has hr10",
        ),
        (GOOD + "[evaluation]\nsample_cap = 0.5\n", "evaluation.sample_cap is 0.5; expected 0 or"),
        (GOOD + "[evaluation]\nmetric = 1\n", "evaluation.metric is unknown here; known are"),
        (FEDAVG + "[evaluation]\n", "evaluation asks for .* names no metric: export it again"),
        (GOOD + "[metrics]\nport = 70000\n", "metrics.port is 70000"),
        (GOOD + "[keys]\ndescriptor_days = 0\n", "keys.descriptor_days is 0"),
        (GOOD + "[keys]\ndays = 3\n", "keys.days"),
        (GOOD + "[store]\ngroup_updates = 0\n", "store.group_updates is 0"),
        (GOOD + "[rounds]\n", "rounds is unknown here; known are"),
        ("task = 3\n", "task must be a table"),
        ("[task\n", "is not TOML"),
        ("task = " + "[" * 5000 + "]" * 5000 + "\n", "is not TOML"),
    ],
)
def test_a_slip_names_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        read_task(write(tmp_path, text))
    assert str(tmp_path / "task.toml") in str(caught.value)


def test_a_catalogue_no_file_can_be_called_is_named() -> None:
    with pytest.raises(AggregatorError, match=r"the catalogue .* cannot be read"):
        read_catalogue_file(Path("items\0.tsv"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot be read"):
        read_task(tmp_path / "nowhere.toml")


def test_an_evaluation_goes_by_what_every_artifact_names(tmp_path: Path) -> None:
    linear_artifact(tmp_path / "small", "mae", "rmse")
    linear_artifact(tmp_path / "large", "rmse")
    two = '[task]\nmethod = "attention"\nartifacts = ["small", "large"]\n'
    found = read_task(write(tmp_path, two + "[evaluation]\n")).evaluation
    assert found is not None and (found.metrics, found.best_by) == (("rmse",), "rmse")
    assert not found.ranking.higher_is_better
    text = two + '[evaluation]\nbest_by = "personal.rmse"\nevery_rounds = 5\nshare = 0.2\n'
    asked = read_task(write(tmp_path, text))
    assert asked.evaluation is not None and asked.ranking == asked.evaluation.ranking
    assert asked.evaluation.ranking.metric == "personal.rmse"
    assert (asked.evaluation.terms.every_rounds, asked.evaluation.terms.share) == (5, 0.2)
    spelt = read_task(write(tmp_path, text.replace("personal.rmse", "global.rmse"))).evaluation
    assert spelt is not None and spelt.best_by == "rmse"
    with pytest.raises(TaskError, match=r"metrics names 'mae'; the artifacts name rmse"):
        read_task(write(tmp_path, two + '[evaluation]\nmetrics = ["mae"]\n'))
    assert read_task(write(tmp_path, two)).evaluation is None


def test_the_best_version_is_named_by_what_the_method_s_devices_evaluate(tmp_path: Path) -> None:
    linear_artifact(tmp_path / "linear", "rmse", "mae")
    tables = {
        "teacher_logits": "[teacher_logits.training]\nclasses = 3\n",
        "mutual": "[mutual.training]\nclasses = 3\n",
        "prototypes": "[prototypes.training]\nclasses = 3\n",
        "fedavg": "",
        "attention": "",
    }

    def best_by(method: str, more: str = "", key: str = "") -> str | None:
        path = tmp_path / "task.toml"
        head = f'[task]\nmethod = "{method}"\nartifacts = ["linear"]\n'
        path.write_text(head + tables[method] + more + f"[evaluation]\n{key}")
        found = read_task(path).evaluation
        assert found is not None
        return found.best_by

    for method in ("teacher_logits", "mutual", "prototypes"):
        assert best_by(method) == "personal.mae"
        assert best_by(method, key='best_by = "personal.rmse"') == "personal.rmse"
        with pytest.raises(TaskError, match=f"with {method} devices evaluate personal.mae, pers"):
            best_by(method, key='best_by = "rmse"')
    own = 'best_by = "personal.mae"'
    assert best_by("fedavg") == best_by("attention") == "mae"
    assert best_by("fedavg", key=own) == best_by("attention", key=own) == "personal.mae"
