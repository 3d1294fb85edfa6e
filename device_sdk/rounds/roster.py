"""Which tasks are this device's: served, meant for it, and wished for by its owner."""

from __future__ import annotations

from collections.abc import Mapping

from device_sdk.wire.publish.standing import Standing
from device_sdk.wire.seal.announcement import ServedTasks
from device_sdk.world import DeviceWorld


class Roster:
    """From what the aggregator tells, and from what the owner chose.

    Served are the tasks of the aggregator's signed list, of these the ones of the device's standing
    where there is one. Until a list has come, and with an aggregator that sends none, it goes by
    what it heard last, at first the task that it was enrolled with. What is served no more is
    cleaned from the home (:meth:`device_sdk.home.home.Home.clean`).
    """

    def __init__(self, world: DeviceWorld) -> None:
        self._world, self._membership = world, world.membership
        rows = world.home.tasks.all()
        self._served = {row.name: row.cohort for row in rows if row.served}
        if not rows:
            self._served = {self._membership.task: self._membership.cohort}
        self._listed: ServedTasks | None = None
        self.standing: Standing | None = None
        """As the aggregator told it in this session."""

    @property
    def unserved(self) -> str:
        """That there is no task here for this device, for people; empty where there is one."""
        own, listed = self._membership, self._listed
        if listed is None:
            return ""
        lacking = [name for name in self._world.tasks if name not in self._served]
        if lacking:
            names = ", ".join(map(repr, lacking))
            return f"the aggregator serves no task {names} for this device; there is {listed}"
        if own.is_wish and not self._world.tasks:
            if (own.task, own.cohort) in listed.names and own.task in self._served:
                return ""
            return (
                f"the aggregator serves no task {own.task!r} with cohort {own.cohort!r}; there is "
                f"{listed}"
            )
        if self.listening():
            return ""
        return f"the aggregator serves no task for this device; there is {listed}"

    def told(self, listed: ServedTasks | None) -> None:
        """The list in force; None while none is. Raises ``sqlite3.Error``."""
        self._listed = listed
        if listed is None:
            return
        names = set(listed.names)
        if self.standing is not None:
            names &= set(self.standing.tasks)
        own = self._membership
        served: dict[str, str] = {}
        for task, cohort in sorted(names):
            if own.is_wish and task == own.task and cohort != own.cohort:
                continue
            served.setdefault(task, cohort)
        if served != self._served or not self._world.home.tasks.all():
            gone = self._served.keys() - served.keys()
            self._world.home.tasks.set_served(served)
            self._served = served
            if gone:
                self._world.home.clean()

    def listening(self) -> Mapping[str, str]:
        """Tasks to take part in, by name with their cohorts."""
        chosen = self._world.wishes()
        own = self._membership
        found = {
            task: cohort
            for task, cohort in self._served.items()
            if chosen is None or task in chosen
        }
        if own.is_wish and chosen is not None and own.task in chosen:
            found.setdefault(own.task, own.cohort)  # it may be served one day
        return found
