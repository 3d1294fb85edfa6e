"""Audit: who did what with the fleet, when, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from aggregator.clock import moment_of
from aggregator.console.pages.page import ConsolePage, PageQuery
from aggregator.operate.audit import DONE
from aggregator.operate.fleet import Fleet
from device_sdk.system.printable import printable

_MOST = 200


@dataclass(frozen=True, slots=True)
class AuditLine:
    """An entry of the log, as it is shown."""

    moment: str
    actor: str
    action: str
    arguments: str
    outcome: str
    is_done: bool


@dataclass(frozen=True, slots=True)
class AuditView:
    """The newest first."""

    lines: tuple[AuditLine, ...]


def _read(fleet: Fleet, query: PageQuery) -> AuditView:
    return AuditView(
        tuple(
            AuditLine(
                moment_of(int(each.unix_seconds)),
                printable(each.actor),
                printable(each.action),
                printable(", ".join(f"{n}: {_said(value)}" for n, value in each.arguments.items())),
                printable(each.outcome),
                each.outcome == DONE,
            )
            for each in reversed(fleet.audit(_MOST))
        )
    )


def _said(value: object) -> str:
    """Labels, and items of lists, with spaces between, as the commands take them."""
    if isinstance(value, dict):
        return " ".join(f"{name}={each}" for name, each in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


AUDIT = ConsolePage("audit", "Audit", _read)
