"""A fleet that moves to another broker while it works: nothing is lost, nothing counted twice."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome
from device_sdk import Device, Pace
from device_sdk.cli import main as device_command
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import free_port, password_file
from tests.fakes.homes import ServeProcess, command, invite, make_home, open_store
from tests.fakes.outputs import output_of
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

ROUND = "quorum = 1\nleast_deadline_seconds = 0.1\npause_seconds = 0.1"
PACE = Pace(
    answer_seconds=1.0, reopen_seconds=0.2, fetch_seconds=2.0, most_seconds=5.0, cell_seconds=3.0
)


class Devices:
    """In this process."""

    def __init__(
        self, home: AggregatorHome, url: str, count: int, folder: Path, stack: ExitStack
    ) -> None:
        self.devices = []
        for place, code in enumerate(invite(home, count)):
            device = stack.enter_context(
                Device.enrol(
                    url,
                    code,
                    folder / f"device-{place}",
                    timeout_seconds=PATIENCE_SECONDS,
                    link_settings=QUICK,
                    pace=PACE,
                )
            )
            device.record_all((f"item-{row}", "anna") for row in range(place, place + 5))
            device.start()
            self.devices.append(device)

    def rounds(self) -> list[int]:
        return [each.status().receipted_round or 0 for each in self.devices]

    def problems(self) -> object:
        return [each.status().problem for each in self.devices]

    def await_rounds(self, more: int = 2) -> None:
        before = self.rounds()
        wait_until(
            lambda: all(now >= was + more for now, was in zip(self.rounds(), before, strict=True)),
            self.problems,
        )

    def at(self, url: str) -> bool:
        return all(each.status().broker == url for each in self.devices)

    def stop(self) -> None:
        for each in self.devices:
            each.stop()


class Fleet(Devices):
    """Serve in a process of its own, and devices in this one."""

    def __init__(self, folder: Path, url: str, devices: int, stack: ExitStack) -> None:
        self.home = make_home(folder, url, ROUND)
        self.serve = ServeProcess(self.home)
        self.serve.start()
        stack.callback(self.serve.stop)
        super().__init__(self.home, url, devices, folder, stack)

    def problems(self) -> object:
        return super().problems(), self.serve.log.read_text()


def require_each_counted_once(home: AggregatorHome) -> None:
    store = open_store(home)
    (counted,) = store.database.row("SELECT count(*) FROM verdicts WHERE reason IS NULL") or ()
    (closed,) = store.database.row("SELECT coalesce(sum(participants), 0) FROM rounds") or ()
    assert counted == closed + store.first.log.last_seq() > 0
    refused = store.database.row("SELECT count(*) FROM verdicts WHERE reason = 'conflict'")
    store.database.close()
    assert refused == (0,)


def test_devices_move_by_themselves_and_the_old_broker_can_go(
    tmp_path: Path, make_mosquitto: MakeMosquitto, capsys: pytest.CaptureFixture[str]
) -> None:
    """A running fleet is told another broker; serve and devices are there, then the old one is
    switched off. It holds over restarts of serve and of devices, and once the grace is over."""
    old, new = make_mosquitto(), make_mosquitto()
    with ExitStack() as stack:
        fleet = Fleet(tmp_path, old.url, 3, stack)
        fleet.await_rounds()
        assert f"moves        to {new.url}" in output_of(
            capsys, fleet.home, "broker", "move", new.url, "--grace", "20s"
        )
        wait_until(lambda: fleet.at(new.url), fleet.problems)
        fleet.await_rounds()
        assert device_command(["broker", "--home", str(fleet.devices[0].home)]) == 0
        assert f"tried first  {new.url}: the fleet is there" in capsys.readouterr().out
        old.stop()
        fleet.await_rounds()
        fleet.devices[0].stop()
        fleet.devices[0].start()
        fleet.serve.kill()
        fleet.serve.start()
        fleet.await_rounds()

        def said(name: str) -> str:
            command(fleet.home, name)
            return capsys.readouterr().out

        moved = f"moved        to {new.url}: write broker.url"
        wait_until(lambda: moved in said("broker"))
        wait_until(lambda: f"runs, connected to {new.url} for" in said("status"))
        fleet.await_rounds()
        fleet.stop()
    require_each_counted_once(fleet.home)


def test_a_task_that_was_replaced_meanwhile_is_served_at_the_new_broker(
    tmp_path: Path, make_mosquitto: MakeMosquitto
) -> None:
    """Serve begins anew at the new broker with its tasks as they are, not as they were when its
    process started; what its file wants in vain leaves it as it was, and is told of."""
    old, new = make_mosquitto(), make_mosquitto()
    home = make_home(tmp_path, old.url, ROUND)
    serve = ServeProcess(home)
    serve.start()
    try:
        serve.await_connections(1)
        other = tmp_path / "other.toml"
        text = home.task_file.read_text().replace("columns = 8", "columns = 4", 1)
        other.write_text(text.replace("items.tsv", str(home.folder / "items.tsv")))
        assert command(home, "task", "replace", "default", "--from", str(other)) == 0
        home.task_file.write_text(text.replace("columns = 4", "columns = 6"))
        assert command(home, "broker", "move", new.url, "--grace", "1h") == 0
        told, anew = "goes on with the settings it had", "connecting anew"
        wait_until(
            lambda: told in serve.log.read_text().partition(anew)[2] or serve.ended() is not None,
            serve.log.read_text,
        )
        assert serve.ended() is None, serve.log.read_text()
    finally:
        assert serve.stop() == 0, serve.log.read_text()


@pytest.mark.exhaustive
def test_a_broker_that_cannot_be_reached_is_left_again(
    tmp_path: Path, make_mosquitto: MakeMosquitto
) -> None:
    """Nobody listens at the first that is announced, the second lets no device in; the devices are
    back at the old one each time, and rounds go on there. Then the move is called off."""
    old = make_mosquitto()
    closed = make_mosquitto(
        "allow_anonymous false", f"password_file {password_file(tmp_path / 'words', {'a': 'b'})}"
    )
    (tmp_path / "word").write_text("b")
    nowhere = f"mqtt://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        fleet = Fleet(tmp_path, old.url, 2, stack)
        fleet.await_rounds()
        user = ("--user", "a", "--password-file", str(tmp_path / "word"))
        for url, *options in ((nowhere,), (closed.url, *user)):
            assert command(fleet.home, "broker", "move", url, *options, "--grace", "1h") == 0
            wait_until(lambda url=url: any(each.status().broker == url for each in fleet.devices))
            wait_until(lambda: fleet.at(old.url))
            fleet.await_rounds()
        assert command(fleet.home, "broker", "stay") == 0
        fleet.await_rounds()
        fleet.stop()
    require_each_counted_once(fleet.home)


@pytest.mark.exhaustive
def test_nobody_leaves_the_broker_that_works_for_one_that_is_not_there(
    tmp_path: Path, make_mosquitto: MakeMosquitto, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fleet has moved, and its first broker is gone; the third is not there before, during and
    after the grace. All work on at the second, as status says, and move when the third comes."""
    first, second, third = (make_mosquitto() for _ in range(3))
    third.stop()

    def said(*arguments: str) -> str:
        return output_of(capsys, fleet.home, *arguments)

    with ExitStack() as stack:
        fleet = Fleet(tmp_path, first.url, 2, stack)
        fleet.await_rounds()
        said("broker", "move", second.url, "--grace", "1s")
        wait_until(lambda: fleet.at(second.url) and "\nmoved  " in said("broker"))
        first.stop()
        fleet.await_rounds()
        until = time.time() + 1
        said("broker", "move", third.url, "--grace", "1s")
        wait_until(lambda: any(each.status().broker == third.url for each in fleet.devices))
        wait_until(lambda: time.time() > until + 1)
        fleet.await_rounds()
        assert f"until a device has been at {third.url}: none has yet" in said("status")
        assert f"{second.url}\n" in said("broker")
        third.start()
        wait_until(lambda: fleet.at(third.url), fleet.serve.log.read_text)
        wait_until(lambda: "\nmoved  " in said("broker"))
        second.stop()
        fleet.await_rounds()
        fleet.stop()
    require_each_counted_once(fleet.home)


def test_a_move_that_follows_another_or_is_called_off_leaves_nobody_behind(
    tmp_path: Path, make_mosquitto: MakeMosquitto, capsys: pytest.CaptureFixture[str]
) -> None:
    """To a second broker, which the task file never names; on to a third, which is called off; on
    once more and, within that grace, back to the first. All hear of it wherever they are."""
    first, second, third = (make_mosquitto() for _ in range(3))

    def move(*arguments: str) -> str:
        return output_of(capsys, fleet.home, "broker", *arguments)

    with ExitStack() as stack:
        fleet = Fleet(tmp_path, first.url, 2, stack)
        fleet.await_rounds()
        move("move", second.url, "--grace", "5s")
        wait_until(lambda: fleet.at(second.url))
        wait_until(lambda: "\nmoved  " in move())
        first.stop()
        for going, there in (
            (("move", third.url, "--grace", "1h"), third),
            (("stay",), second),
            (("move", third.url, "--grace", "1h"), third),
        ):
            move(*going)
            wait_until(lambda there=there: fleet.at(there.url), lambda: fleet.serve.log.read_text())
            fleet.await_rounds()
        first.start()
        assert f"broker       {first.url}, {third.url}, {second.url}" in move(
            "move", first.url, "--grace", "5s"
        )
        wait_until(lambda: fleet.at(first.url))
        second.stop()
        third.stop()
        fleet.await_rounds()
        fleet.stop()
    require_each_counted_once(fleet.home)
