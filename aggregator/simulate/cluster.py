"""Virtual devices on the workers of a Ray cluster: the same answers, from more cores.

A device is one worker's for the whole run, which keeps what it remembers. Blocks of devices go
round the workers, so that answers come from all of them in the order of the devices; a round is
published once, through Ray's object store.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aggregator.cluster.joined_ray import JoinedRay
from aggregator.errors import AggregatorError
from aggregator.evaluation import DeviceReport
from aggregator.simulate.devices import Chosen, DeviceAnswer, DeviceSettings, VirtualDevices
from aggregator.simulate.traffic import PublishedRound

_BLOCK = 64
"""Devices that lie together on one worker, and answer in one call."""
_AHEAD = 2
"""Blocks a worker has before it, so that it never waits for the next."""


def on_ray(address: str, workers: int | None) -> Any:
    """Makes the devices of a run on Ray's workers.

    Args:
        address: of a running cluster; empty for a Ray of our own, which ends with the run.
        workers: how many; None for as many as there are CPU cores.

    Raises AggregatorError where Ray is missing, or the cluster lets strangers in.
    """
    cores = workers or os.cpu_count() or 1
    joined = JoinedRay(address or None, cores, log_to_driver=False)

    def make(settings: DeviceSettings) -> VirtualDevices:
        return RayDevices(settings, joined, workers)

    return make


class _Worker:
    """One worker's devices; every worker could make any of them."""

    def begin(self, settings: DeviceSettings, folder: str) -> None:
        """Make them. ``folder``: from which the task's and the data's paths are told."""
        try:
            os.chdir(folder)
        except OSError as error:
            raise AggregatorError(
                f"{platform.node()} of the cluster cannot open {folder} ({error.strerror}): the "
                "task's files and --data must lie there as they do here"
            ) from None
        self._devices = settings.make()

    def understood(self) -> tuple[str, ...]:
        return self._devices.understood

    def round(self, published: PublishedRound, chosen: Sequence[Chosen]) -> list[DeviceAnswer]:
        return list(self._devices.round(published, chosen))

    def popularity(self) -> list[DeviceReport]:
        return self._devices.popularity()

    def reports(self) -> tuple[str, ...]:
        return self._devices.reports()

    def settle(self, number: int, counted: Mapping[int, bool]) -> None:
        self._devices.settle(number, counted)


class RayDevices(VirtualDevices):
    """See the module. ``close`` ends a Ray that was started here, and removes what it wrote."""

    def __init__(self, settings: DeviceSettings, joined: JoinedRay, workers: int | None) -> None:
        self._joined = joined
        try:
            if not joined.join():
                raise KeyboardInterrupt
            self._ray: Any = joined.ray
            cores = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
            count = workers or cores
            if count > cores:
                raise AggregatorError(f"--workers is {count}; the cluster has {cores} CPU cores")
            kind: Any = self._ray.remote(num_cpus=1, max_restarts=0)(_Worker)
            self._workers = [kind.remote() for _ in range(count)]
            here = str(Path.cwd())
            self._got([worker.begin.remote(settings, here) for worker in self._workers])
            self.understood = self._got(self._workers[0].understood.remote())
        except BaseException:
            self.close()
            raise

    def round(self, published: PublishedRound, chosen: Sequence[Chosen]) -> Iterator[DeviceAnswer]:
        shared = self._ray.put(published)
        blocks = iter(_blocks(chosen))
        waiting: deque[Any] = deque()
        while True:
            while len(waiting) < _AHEAD * len(self._workers):
                block = next(blocks, None)
                if block is None:
                    break
                worker = self._workers[block[0].device // _BLOCK % len(self._workers)]
                waiting.append(worker.round.remote(shared, block))
            if not waiting:
                return
            yield from self._got(waiting.popleft())

    def popularity(self) -> list[DeviceReport]:
        # Each worker has all of the data, though it trains a part of the devices.
        found: list[DeviceReport] = self._got(self._workers[0].popularity.remote())
        return found

    def reports(self) -> tuple[str, ...]:
        told = self._got([worker.reports.remote() for worker in self._workers])
        return tuple(sorted({each for reports in told for each in reports}))

    def settle(self, number: int, counted: Mapping[int, bool]) -> None:
        by_worker: list[dict[int, bool]] = [{} for _ in self._workers]
        for device, was in counted.items():
            by_worker[device // _BLOCK % len(self._workers)][device] = was
        self._got(
            [
                worker.settle.remote(number, own)
                for worker, own in zip(self._workers, by_worker, strict=True)
            ]
        )

    def _got(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, AggregatorError):
                raise AggregatorError(str(cause)) from None
            raise AggregatorError(f"a worker failed: {cause or error}") from error
        except self._ray.exceptions.RayError as error:
            raise AggregatorError(
                f"a worker was lost, and its devices' states with it: {error}"
            ) from error

    def close(self) -> None:
        self._joined.leave()


def _blocks(chosen: Sequence[Chosen]) -> Iterator[list[Chosen]]:
    """Those that lie together on a worker, in the order of the devices."""
    block: list[Chosen] = []
    for each in chosen:
        if block and each.device // _BLOCK != block[0].device // _BLOCK:
            yield block
            block = []
        block.append(each)
    if block:
        yield block
