"""A Mosquitto that refuses subscriptions: ACL files never do, its dynamic-security plugin does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from device_sdk.link.events import Outcome
from device_sdk.link.link import Link
from tests.fakes.waiting import PATIENCE_SECONDS

_ROLE = "fleet"
_CONTROL = "$CONTROL/dynamic-security/v1"


class SubscriptionRules:
    """Which subscriptions are refused; all else is allowed to everybody. Skips without the plugin.

    ``lines`` belong into the configuration of a :class:`~tests.brokers.mosquitto.Mosquitto`.
    """

    def __init__(self, folder: Path, *refused: str) -> None:
        name = "mosquitto_dynamic_security.so"
        found = [*Path("/usr").glob(f"lib*/{name}"), *Path("/usr").glob(f"lib/*/{name}")]
        if not found:
            pytest.skip("this Mosquitto has no dynamic-security plugin")
        self._file = folder / "subscription-rules.json"
        self.write(*refused)
        self.lines = (
            "allow_anonymous true",
            f"plugin {found[0]}",
            f"plugin_opt_config_file {self._file}",
        )

    def write(self, *refused: str) -> None:
        """The rules that the next start finds."""
        allowed = ("publishClientSend", "publishClientReceive", "subscribe", "unsubscribe")
        self._file.touch(mode=0o600)
        self._file.write_text(
            json.dumps(
                {
                    "defaultACLAccess": dict.fromkeys(allowed, True),
                    "clients": [],
                    "roles": [{"rolename": _ROLE, "acls": _acls(refused)}],
                    "groups": [{"groupname": "all", "roles": [{"rolename": _ROLE}], "clients": []}],
                    "anonymousGroup": "all",
                }
            )
        )

    def change(self, link: Link, *refused: str) -> None:
        """Other rules from now on, told to the running broker over ``link``."""
        command = {"command": "modifyRole", "rolename": _ROLE, "acls": _acls(refused)}
        message = json.dumps({"commands": [command]}).encode()
        assert link.publish(_CONTROL, message).wait(PATIENCE_SECONDS) is Outcome.ACKNOWLEDGED


def _acls(refused: tuple[str, ...]) -> list[dict[str, object]]:
    control = {"acltype": "publishClientSend", "topic": "$CONTROL/#", "allow": True}
    rules = [{"acltype": "subscribePattern", "topic": each, "allow": False} for each in refused]
    return [{**rule, "priority": 0} for rule in (control, *rules)]
