"""What devices train of a task, and what operators see it called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from device_sdk.artifact.manifest import Manifest

_OPTION_BYTES = 16
_COLUMNS = re.compile(r"k=[1-9][0-9]{0,5}")


def option_name(artifact: str) -> str:
    """What a device's report calls an artifact: the first 16 bytes of its name."""
    return artifact.encode()[:_OPTION_BYTES].decode(errors="ignore")


def taken_for_one(artifacts: Sequence[str]) -> str:
    """Says which of a task's artifacts devices' reports do not tell apart; empty for none."""
    called = [option_name(each) for each in artifacts]
    alike = [name for name, cut in zip(artifacts, called, strict=True) if called.count(cut) > 1]
    if not alike:
        return ""
    return (
        f"a device's report calls an artifact by the first {_OPTION_BYTES} bytes of its name, in "
        f"which some agree: {', '.join(alike)}. They are one part in evaluations --parts, devices "
        "and Prometheus. To tell them apart export them under other names, and replace the task"
    )


@dataclass(frozen=True)
class ModelParts:
    """The parts of a task, by name: its artifacts, or a ladder's rungs; else ``k=N``.

    Attributes:
        artifacts: what reports call the task's.
        rungs: of a ladder, what reports call each, by its number.
    """

    artifacts: frozenset[str] = frozenset()
    rungs: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, manifests: Sequence[Manifest]) -> Self:
        """Of a task's artifacts."""
        rungs = {
            each.submodel.rung: option_name(each.name)
            for each in manifests
            if each.submodel is not None
        }
        return cls(frozenset(option_name(each.name) for each in manifests), rungs)

    def trained(self, width: int) -> str:
        """What an update was of, ``width`` being what the method says (``Binding.width_of``): a
        rung's name or ``k=N``; empty for 0, all of the model."""
        return self.rungs.get(width, f"k={width}") if width else ""

    def told(self, option: str, width: int = 0) -> str:
        """What a report is about: the part that its update was of, else the one that the device
        names; empty for what the task has not."""
        known = option in self.artifacts or _COLUMNS.fullmatch(option)
        return self.trained(width) or (option if known else "")

    def counts(self, widths: Mapping[int, int]) -> dict[str, int]:
        """How many trained which, smallest part first, of how many by width."""
        found: dict[str, int] = {}
        for width, count in sorted(widths.items()):
            part = self.trained(width)  # of two rungs, where their names agree so far
            found[part] = found.get(part, 0) + count
        return found
