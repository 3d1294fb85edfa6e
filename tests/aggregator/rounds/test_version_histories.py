"""Any history of rounds, pins, rollbacks and replacements, beside a naive model of what is kept."""

from __future__ import annotations

import contextlib
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from aggregator.errors import AggregatorError
from aggregator.store import TaskStore
from aggregator.task.warm_start import WarmStart
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from tests.aggregator.rounds.test_evaluator import DEVICES, ROUND, Fleet, hits, ranked
from tests.fakes.homes import ITEMS, command
from tests.fakes.scatter_updates import of_triples

LAST, BEST = 2, 1
SHARES = {share: hits(share) for share in (0.2, 0.5, 0.8)}
# A loss whose models are of one width: of least squares a version of any width fits.
LOSS = 'loss = "bpr"'
BODIES = {
    width: encode_scatter_update(Update(1, of_triples(range(4), range(width))), width, "float32")
    for width in (8, 12)
}


@dataclass
class Made:
    """A version, as the model knows it. ``line``: how many models the task had before its own."""

    line: int
    optimizer: str
    items: np.ndarray
    figure: float | None = None
    pinned: bool = False
    kept: bool = True


class History(RuleBasedStateMachine):
    """A serving home with three devices that are heard of, and each version in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        more = f"[models]\nkeep_last = {LAST}\nkeep_best = {BEST}"
        self.fleet = Fleet(Path(self.folder.name), "best_by = 'hr10'\n" + more, ROUND, LOSS)
        self.fleet.body = BODIES[8]
        self.drawn: dict[int, np.ndarray] = {}
        self.versions: list[Made] = []
        self.line, self.width, self.optimizer = 0, 8, "adam"
        self.awaited: int | None = None
        self.said: float | None = None  # of the newest version, which has its figure with the next
        # Width, optimizer, whether with the newest version, and the one that is gone back to.
        self.requested: tuple[int, str, bool, int | None] | None = None
        self.made()
        self.drawn[8] = self.versions[0].items
        self.fleet.tick()

    def teardown(self) -> None:
        self.fleet.parts.store.database.close()
        self.folder.cleanup()

    @property
    def store(self) -> TaskStore:
        return self.fleet.parts.first.store

    def run(self, *arguments: str) -> bool:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return command(self.fleet.home, *arguments) == 0

    # -- the model ---------------------------------------------------------------------------------

    def made(self, items: np.ndarray | None = None) -> None:
        """Another version, of these vectors or of those that the rounds made; and who goes."""
        if items is None:
            row = self.store.versions.find(len(self.versions))
            assert row is not None
            # Others may have followed at once, and this one be gone again: then nobody asks for it.
            items = np.empty((0, self.width), np.float32)
            if row.kept:
                items = self.store.versions.model(row.version)["items"]
        self.versions.append(Made(self.line, self.optimizer, items))
        self.said = None
        numbers = [number for number, each in enumerate(self.versions) if each.kept]
        stay = {*numbers[-LAST:], *self.best()[:BEST], self.awaited}
        if self.requested is not None:
            stay.add(self.requested[3])
        for number in numbers:
            each = self.versions[number]
            each.kept = each.pinned or number in stay

    def best(self, lines: str = "all") -> list[int]:
        """Those with a figure: of the present model, then of those before, each the best first."""
        found = [
            (each.line != self.line, -each.figure, number)
            for number, each in enumerate(self.versions)
            if each.kept and each.figure is not None and (lines == "all" or each.line == self.line)
        ]
        return [number for _, _, number in sorted(found)]

    def gone_back(self) -> None:
        if self.awaited is not None:
            items = self.versions[self.awaited].items
            self.made(items)
            self.awaited = None

    def replaced(self, width: int, optimizer: str, warm: bool, back: int | None) -> None:
        items = self.versions[-1].items
        if back is not None:
            items, warm = self.versions[back].items, True
        same = width == self.width
        self.width, self.optimizer, self.requested = width, optimizer, None
        if not same:
            self.line += 1
            self.awaited = None
        self.made(items if warm else self.drawn.get(width))
        self.drawn.setdefault(width, self.versions[-1].items)
        self.fleet.body = BODIES[width]

    def draw(self, data: st.DataObject) -> tuple[int, Made]:
        """A version, mostly one that is kept."""
        kept = [number for number, each in enumerate(self.versions) if each.kept]
        number = data.draw(st.sampled_from([*kept, 0]))
        return number, self.versions[number]

    # -- what happens ------------------------------------------------------------------------------

    @rule(share=st.sampled_from([*SHARES, None]), trained=st.sampled_from([True, True, False]))
    def round(self, share: float | None, trained: bool) -> None:
        """A round of the newest version; where nobody trained, none follows it."""
        for device in DEVICES[:3]:
            said = None if share is None else ranked(SHARES[share][device])
            assert self.fleet.send(device, said, trained=trained) is None
        self.fleet.commit()
        self.fleet.now += 101
        self.fleet.tick()
        self.said = self.said if share is None else share
        if trained:
            self.versions[-1].figure = self.said
            self.made()
        self.gone_back()
        if self.requested is not None:
            self.replaced(*self.requested)

    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        number, each = self.draw(data)
        allowed = each.kept if pinned else each.pinned
        assert self.run("models", "--pin" if pinned else "--unpin", str(number)) == allowed
        if allowed:
            each.pinned = pinned

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        number, each = self.draw(data)
        allowed = each.kept and self.requested is None
        assert self.run("rollback", "--to", str(number)) == allowed
        if allowed and each.items.shape[1] == self.width:
            self.awaited = number
        elif allowed:  # the file of then comes back with it
            self.awaited, self.requested = None, (each.items.shape[1], each.optimizer, True, number)

    @rule(width=st.sampled_from([8, 12]), name=st.sampled_from(["adam", "plain"]), data=st.data())
    def replace(self, width: int, name: str, data: st.DataObject) -> None:
        warm, now = data.draw(st.booleans(), "warm"), data.draw(st.booleans(), "now")
        text = self.fleet.home.task_file.read_text()
        head, _, _ = text.partition("[scatter]")
        _, table, evaluation = text.partition("[evaluation]")
        scatter = f"[scatter]\n{LOSS}\ncolumns = {width}\n"
        optimizer = f'[scatter.optimizer]\nname = "{name}"\n'
        file = self.fleet.home.folder / "next.toml"
        file.write_text(f"{head}{scatter}{optimizer}{table}{evaluation}")
        options = ["--warm-start"] * warm + ["--now"] * now
        fits = not warm or width == self.width
        assert self.run("task", "replace", "default", "--from", str(file), *options) == fits
        if fits:
            self.requested = (width, name, warm, None)
        if now and self.requested is not None and fits:
            self.fleet.parts.tasks.look_again()
            self.replaced(*self.requested)
            self.gone_back()
            self.fleet.tick()

    @rule(data=st.data())
    def another_task_begins(self, data: st.DataObject) -> None:
        """With one of these versions, as a task of the same home may."""
        best = self.best("present")
        number, each = self.draw(data)
        wanted = {
            "best": best[0] if best else None,
            "latest": len(self.versions) - 1,
            str(number): number if each.kept else None,
        }
        task = self.fleet.parts.first.task
        for name, expected in wanted.items():
            if expected is not None and self.versions[expected].items.shape[1] != self.width:
                continue
            method = task.binding.build(ITEMS, np.random.default_rng(5), ())
            start = WarmStart.read(f"task:default@{name}", self.fleet.home.folder)
            try:
                start.begin(method, self.store, task.ranking, ())
            except AggregatorError:
                assert expected is None
                continue
            assert expected is not None
            arrays = method.model_arrays
            assert arrays is not None
            np.testing.assert_array_equal(arrays["items"], self.versions[expected].items)

    @rule(call_off=st.booleans())
    def die(self, call_off: bool) -> None:
        self.fleet.restart()
        self.fleet.tick()
        if call_off:
            self.run("rollback", "--cancel")
            if (
                self.awaited is None
                and self.requested is not None
                and self.requested[3] is not None
            ):
                self.requested = None
            self.awaited = None

    # -- what holds --------------------------------------------------------------------------------

    @invariant()
    def is_as_the_model_says(self) -> None:
        store, newest = self.store, len(self.versions) - 1
        checkpoint = store.checkpoints.get("version")
        assert checkpoint is not None
        assert checkpoint.version == self.fleet.parts.first.aggregation.version == newest
        np.testing.assert_array_equal(checkpoint.state["items"], self.versions[-1].items)
        served: Any = self.fleet.parts.first.task.binding.settings
        assert (served.columns, served.optimizer.name) == (self.width, self.optimizer)
        rows = store.versions.all()[::-1]
        assert [row.version for row in rows] == list(range(newest + 1))
        for row, each in zip(rows, self.versions, strict=True):
            assert (row.kept, row.pinned) == (each.kept, each.pinned), row.version
            assert row.metrics.get("hr10") == each.figure
            if each.kept:
                found = store.versions.model(row.version)["items"]
                np.testing.assert_array_equal(found, each.items)
        assert self.versions[-1].kept
        assert all(each.kept for each in self.versions if each.pinned)
        assert store.versions.awaited() == self.awaited
        assert self.awaited is None or self.versions[self.awaited].kept
        ranking = self.fleet.parts.first.task.ranking
        assert [row.version for row in store.versions.ranked(ranking)] == self.best("present")
        evaluated = {each.version for each in store.evaluations.latest(len(self.versions))}
        known = {number for number, each in enumerate(self.versions) if each.figure is not None}
        assert evaluated == known
        # What single devices said goes with the next version.
        rows = store.database.rows("SELECT version FROM device_evaluations")
        assert {row[0] for row in rows} <= {newest}


# Hypothesis would take minutes to make a failure small, one history at a time.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def test_what_is_kept_and_what_is_best_is_what_a_naive_model_says() -> None:
    run_state_machine_as_test(
        History,
        settings=settings(max_examples=8, stateful_step_count=25, deadline=None, phases=PHASES),
    )
