"""A device that sends its one update for each round until it has a receipt."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from device_sdk.wire.publish.receipts import Verdict
from tests.fakes.client import ScriptedDevice
from tests.fakes.waiting import PATIENCE_SECONDS


class Stubborn:
    """:meth:`run` it on a thread. ``before_sending`` is called with the number of each round that
    has opened; else the device takes up to half a second."""

    def __init__(
        self,
        device: ScriptedDevice,
        rounds: int,
        before_sending: Callable[[int], object] | None = None,
    ) -> None:
        self.device = device
        self._rounds = rounds
        pace = random.Random(device.code.token_id)
        self._before_sending = before_sending or (lambda _: time.sleep(pace.uniform(0.0, 0.5)))
        self.bodies: dict[int, bytes] = {}
        self.counted: list[int] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for number in range(1, self._rounds + 1):
                self._round(number)
        except BaseException as error:
            self.error = error

    def _round(self, number: int) -> None:
        device = self.device
        manifest = device.await_round(number)
        assert manifest.round == number
        self._before_sending(number)
        until = time.monotonic() + PATIENCE_SECONDS
        body = self.bodies.setdefault(number, device.body())
        while True:
            digest = device.send(device.identity_for(manifest), body)
            again = time.monotonic() + 0.5
            while time.monotonic() < again and digest not in device.receipts:
                device.pump(0.05)
            receipt = device.receipts.pop(digest, None)
            if receipt is not None:
                assert receipt.verdict is Verdict.COUNTED
                self.counted.append(number)
                return
            assert time.monotonic() < until, "no receipt"
