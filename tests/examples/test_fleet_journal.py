"""What a device process tells the demo, through a file."""

from __future__ import annotations

from pathlib import Path

from examples.fleet.assignment import AssignedDevice, AssignedUser, Assignment, read_assignment
from examples.fleet.journal import (
    Enrolled,
    Finished,
    JournalReader,
    JournalWriter,
    Measured,
    Record,
    RoundQuality,
    Trouble,
    UserShown,
)

RECORDS: tuple[Record, ...] = (
    Enrolled("device-01"),
    Measured("device-01", "phone", 1.5, 16, 0.004, "k = 16 takes 4 ms"),
    RoundQuality("device-01", "phone", 3, 16, 20, 2, 0.75, 7, 3.25),
    Finished("device-01", "phone", 16, 44, 90_000, None, 0, {"bad-tag": 1}),
    UserShown("device-01", "user 7", 16, ("Heat (1995)",), ("Misérables, Les (1995)",), "Fargo"),
    Trouble("device-01", "two\nlines"),
)


def test_every_record_comes_back_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    reader = JournalReader(path)
    assert reader.new_records() == []
    writer = JournalWriter(path)
    for record in RECORDS:
        writer.write(record)
        assert reader.new_records() == [record]
        assert reader.new_records() == []
    writer.close()
    assert JournalReader(path).new_records() == list(RECORDS)


def test_a_line_that_is_being_written_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind":"Enrolled","device":"a"}\n{"kind":"Enr', encoding="utf-8")
    reader = JournalReader(path)
    assert reader.new_records() == [Enrolled("a")]
    with path.open("a", encoding="utf-8") as file:
        file.write('olled","device":"b"}\n')
    assert reader.new_records() == [Enrolled("b")]


def test_an_assignment_is_read_back_and_private(tmp_path: Path) -> None:
    user = AssignedUser("user 7", (0, 2), 1, (3,))
    device = AssignedDevice("device-01", "phone", "/home", "CODE", 2.5, True, (user,))
    assignment = Assignment(
        "mqtt://127.0.0.1",
        3,
        64,
        0.01,
        1e-4,
        "j",
        "v",
        "t",
        ("a", "b", "c", "d"),
        ("A", "B", "C", "D"),
        (),
        (device,),
    )
    path = tmp_path / "assignment.json"
    assignment.write(path)
    assert read_assignment(path) == assignment
    assert path.stat().st_mode & 0o077 == 0
    split = device.split(4)
    assert split.train[0].tolist() == [0, 2]
    assert split.held_out.tolist() == [1]
