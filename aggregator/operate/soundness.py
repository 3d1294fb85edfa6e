"""What is found of a part that is looked at, in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from device_sdk.system.printable import printable


class Soundness(StrEnum):
    """``warning``: ``serve`` starts, and something is not as it should be, or soon will not be;
    ``wrong``: it does not start, or no round would come to anything."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class CheckedPart:
    """``part``: its name; ``to_do``: what helps, empty where nothing has to, or ``what`` says."""

    soundness: Soundness
    part: str
    what: str
    to_do: str = ""

    @property
    def line(self) -> str:
        """For people."""
        said = printable(f"{self.what}: {self.to_do}" if self.to_do else self.what)
        return f"{self.soundness:<7}  {self.part:<7}  {said}"


@dataclass(frozen=True, slots=True)
class Aspect:
    """Says what is found of one."""

    name: str

    def ok(self, what: str) -> CheckedPart:
        return CheckedPart(Soundness.OK, self.name, what)

    def warning(self, what: str, to_do: str = "") -> CheckedPart:
        return CheckedPart(Soundness.WARNING, self.name, what, to_do)

    def wrong(self, what: str, to_do: str = "") -> CheckedPart:
        return CheckedPart(Soundness.WRONG, self.name, what, to_do)
