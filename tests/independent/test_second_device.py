"""A device that was written from the pages takes part in a round of a real aggregator."""

from __future__ import annotations

import base64
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import paho.mqtt.client as mqtt
import pytest

from aggregator.cli import main
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.scatter.factor_step import FactorBatch, TrainerStep
from device_sdk.trainer import Trainer
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.quick import run_python
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS
from tests.independent import second_device
from tests.independent.second_device import Code, Refused, Session, Triples
from tests.test_import_rules import STANDARD, imports_of

VECTORS = Path(__file__).parents[1] / "vectors"
SEALING: dict[str, Any] = json.loads((VECTORS / "sealing.json").read_text())
CODECS: dict[str, Any] = json.loads((VECTORS / "codecs.json").read_text())
DESCRIPTOR = bytes.fromhex(SEALING["descriptor"]["message"])
CODE = second_device.read_code(SEALING["enrolment"]["code"])

ITEMS = 600  # with 64 columns in float16 more than one chunk


def aggregator(command: str, home: Path, *arguments: str) -> str:
    """What `tessera-aggregator COMMAND` prints."""
    with redirect_stdout(StringIO()) as said:
        assert main([command, "--home", str(home), *arguments]) == 0
    return said.getvalue()


@contextmanager
def served(home: Path) -> Iterator[None]:
    with (home / "serve.log").open("w") as log:
        code = "from aggregator.cli import main; raise SystemExit(main())"
        command = [sys.executable, "-c", code, "serve", "--home", str(home), "--plain"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)


def run_device(url: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As a process of its own; ``-P``: the checkout is not where its imports are looked for."""
    return run_python("-P", second_device.__file__, url, *arguments, input=code + "\n")


def test_it_enrols_trains_and_is_counted(mosquitto: Mosquitto, tmp_path: Path) -> None:
    home = tmp_path / "fleet"
    aggregator("init", home)
    (home / "items.tsv").write_text("".join(f"film-{row}\n" for row in range(ITEMS)))
    (home / "task.toml").write_text(
        f'[task]\ncatalogue = "items.tsv"\nartifact = "shipped:mf"\n'
        f'[broker]\nurl = "{mosquitto.url}"\n'
        f"[round]\ndeadline_seconds = {NEVER_SECONDS}\nmost_rounds = 1\n"
        '[scatter]\nloss = "bpr"\n'
    )
    code = aggregator("invite", home).strip()
    with served(home):
        liked = [f"film-{row}" for row in (0, 7, 300, 599)]
        done = run_device(mosquitto.url, code, *liked, "--patience", "100")
        assert (done.returncode, done.stdout.split()) == (0, ["counted"]), done.stderr
        until = time.monotonic() + PATIENCE_SECONDS
        while (told := json.loads(aggregator("status", home, "--json")))["version"] == 0:
            assert time.monotonic() < until, (home / "serve.log").read_text()
            time.sleep(0.1)
    assert (told["version"], told["devices"], told["refusals"]) == (1, 1, {})
    first = told["rounds"][-1]
    assert (first["round"], first["participants"], first["next_version"]) == (1, 1, 1)


def write_code(code: Code) -> str:
    """As the page says, with a right checksum."""
    numbers = code.least_serial.to_bytes(5, "little") + code.made.to_bytes(5, "little")
    body = code.root + code.token + code.secret + numbers
    checksum = hashlib.sha256(b"tessera/1 enrolment code\0" + body).digest()[:5]
    return base64.b32encode(body + checksum).decode()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (CODE._replace(least_serial=SEALING["descriptor"]["serial"] + 1), "serial-fell"),
        (CODE._replace(root=bytes(16)), "wrong-root"),
        (CODE._replace(made=SEALING["descriptor"]["expires_unix_seconds"]), "descriptor-expired"),
    ],
    ids=("serial", "root", "time"),
)
def test_it_sends_nothing_to_whom_its_code_does_not_name(
    mosquitto: Mosquitto, code: Code, reason: str
) -> None:
    heard: list[str] = []
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: heard.append(message.topic)
    client.connect("127.0.0.1", mosquitto.port)
    client.loop_start()
    for topic, message in (("descriptor", DESCRIPTOR.hex()), ("presence", "")):
        payload = bytes.fromhex(message or SEALING["presence"]["message"])
        client.publish(f"tessera/all/{topic}", payload, 1, retain=True).wait_for_publish(5)
    client.subscribe("tessera/enrol/#", 1)
    done = run_device(mosquitto.url, write_code(code), "film-1", "--patience", "100")
    assert (done.returncode, done.stderr) == (1, f"refused: {reason}\n")
    # Behind whatever the device may have sent.
    client.publish("tessera/enrol/end", b"", 1).wait_for_publish(5)
    until = time.monotonic() + PATIENCE_SECONDS
    while not heard and time.monotonic() < until:
        time.sleep(0.01)
    client.disconnect()
    client.loop_stop()
    assert heard == ["tessera/enrol/end"]


def test_it_imports_nothing_of_the_project() -> None:
    source = Path(second_device.__file__).read_text()
    names = {module.partition(".")[0] for _line, module in imports_of(source, "")}
    assert names - STANDARD == {"cbor2", "cryptography", "numpy", "paho"}


def test_it_reads_the_keys_of_the_vectors() -> None:
    vector = SEALING["enrolment"]
    assert (CODE.token.hex(), CODE.secret.hex()) == (vector["token_id"], vector["secret"])
    assert (CODE.least_serial, CODE.made) == (vector["least_serial"], vector["made_unix_seconds"])
    read = second_device.read_descriptor(DESCRIPTOR, CODE)
    assert read.digest.hex() == SEALING["descriptor"]["digest"]
    assert read.root.hex() == SEALING["keys"]["root_fingerprint"]
    former = DESCRIPTOR[3:35]  # a code of before the successions leads to the new root
    follows = CODE._replace(root=second_device.fingerprint(former))
    assert second_device.read_descriptor(DESCRIPTOR, follows) == read
    presence = bytes.fromhex(SEALING["presence"]["message"])
    incarnation = second_device.read_presence(presence, read)
    assert incarnation.hex() == SEALING["presence"]["incarnation"]


@pytest.mark.parametrize("at", [*range(2, 680, 61), len(DESCRIPTOR) - 1])
def test_it_refuses_a_descriptor_with_a_changed_byte(at: int) -> None:
    changed = bytearray(DESCRIPTOR)
    changed[at] ^= 1
    with pytest.raises(Refused):
        second_device.read_descriptor(bytes(changed), CODE)


def test_it_takes_no_key_for_which_anybody_can_sign() -> None:
    identity = b"\1" + bytes(31)  # the neutral element: this signature is right for any message
    with pytest.raises(Refused, match="bad-key"):
        second_device.verify(identity, "descriptor", identity + bytes(32), b"message")


def test_it_seals_and_opens_the_envelopes_of_the_vectors() -> None:
    vector = SEALING["session"]
    up, down = (bytes.fromhex(vector[way]["key"] + vector[way]["iv"]) for way in ("up", "down"))
    session = Session(bytes.fromhex(vector["session_id"]), up, down, {}, 0.0)
    first, _part, receipt = vector["envelopes"]
    assert session.seal(16, bytes.fromhex(first["payload"])).hex() == first["message"]
    message = bytes.fromhex(receipt["message"])
    assert session.open(17, message).hex() == receipt["payload"]
    with pytest.raises(Refused, match="replayed"):
        session.open(17, message)
    lengths = CODECS["padding"].items()
    assert [second_device.padded(int(length)) for length, _ in lengths] == [n for _, n in lengths]


def test_it_writes_the_bodies_of_the_vectors() -> None:
    vector = CODECS["sparse"]
    columns, rows = np.array(vector["columns"]), np.array(vector["rows"])
    values = np.array(vector["values"], np.float32)
    for codec in ("float32", "float16"):
        body = second_device.write_scatter(vector["width"], columns, rows, values, codec)
        assert body.hex() == vector["encodings"][codec.upper()]
    # Each value is a whole code here, which no draw moves.
    body = second_device.write_scatter(vector["width"], columns, rows, values, "int8")
    assert body.hex() == vector["encodings"]["INT8"]
    vector = CODECS["update"]
    said = {name: vector[name] for name in ("task", "generation", "round")}
    device, body = bytes.fromhex(vector["device_id"]), bytes.fromhex(vector["body"])
    message, digest = second_device.write_update(device, said, body)
    assert (message.hex(), digest.hex()) == (vector["payload"], vector["digest"])


def test_it_reads_the_bodies_of_the_vectors() -> None:
    for table in ("tensors", "tensors_int4"):
        for encoding in CODECS[table]["encodings"].values():
            arrays = second_device.read_arrays(bytes.fromhex(encoding))
            for name, array in CODECS[table]["arrays"].items():
                expected = np.array(array["values"], array["dtype"])
                np.testing.assert_allclose(arrays[name], expected, atol=1e-6)
    for verdict, payload in CODECS["receipts"]["payloads"].items():
        receipt = second_device.read_receipt(bytes.fromhex(payload))
        assert receipt["verdict"] == verdict
    fields = second_device.cbor2.loads(bytes.fromhex(CODECS["manifest"]["body"]))
    for each in CODECS["manifest"]["selected"]:
        device = bytes.fromhex(each["device_id"])
        assert second_device.selected(fields, device) == each["selected"]


@pytest.mark.parametrize("scores", ["residual", "columns"])
def test_its_gradients_are_those_of_the_exported_graph(scores: str) -> None:
    rng = np.random.default_rng(5)
    items = rng.standard_normal((9, 6)).astype(np.float32)
    user = rng.standard_normal(6).astype(np.float32)
    columns, settings = np.array([0, 2, 5]), {"scores": scores, "item_l2": 0.25}
    weight = np.array([1, 1, 0.1], np.float32)
    triples = Triples(np.array([1, 3, 6]), np.array([4, 7, 4]), weight)
    rows, values = second_device.gradients(items, user, columns, triples, settings)

    rest = np.setdiff1d(np.arange(6), columns) if scores == "residual" else []
    offset = (items[triples.liked] - items[triples.other])[:, rest] @ user[rest]
    batch = FactorBatch(
        user=np.zeros(3, np.int64),
        positive=triples.liked,
        negative=triples.other,
        weight=weight,
        offset=offset.astype(np.float32),
        user_l2=0.5,
        item_l2=0.25,
    )
    step = TrainerStep(Trainer(packaged_artifact()))
    expected = step.gradients(user[None, columns], items[:, columns], batch).items
    np.testing.assert_allclose(values, expected[rows], rtol=1e-5, atol=1e-6)
    assert np.flatnonzero(expected.any(axis=1)).tolist() == rows.tolist()
