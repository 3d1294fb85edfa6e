"""The task file's table ``[cluster]``: how many workers serve the fleet, and where they hear it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from aggregator.tables import TomlTable
from device_sdk.fields import Within
from device_sdk.link.broker_url import BrokerUrl, parse_broker_url
from device_sdk.link.mirror import parse_mirror_url
from device_sdk.wire.seal.placement import SHARDS, Placement, split_cell

MOST_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class ClusterTable:
    """The table ``[cluster]``, for ``serve --cluster ray``.

    Attributes:
        workers: processes that take updates in, where no cells are listed.
        store: a PostgreSQL URL, for more than one machine (default: the home's own file).
        worker_store: the URL of the same database by which workers reach it, as a role of their own
            (default: ``store``).
        chunks: the URL under which a web server shows ``chunk_store``; devices are told of it, and
            ask it before the broker. Empty: everything comes from the brokers.
        chunk_store: a folder or, where fsspec knows it, a bucket (``s3://...``) to write them to.
    """

    workers: Annotated[int, Within(1, MOST_WORKERS)] = 2
    store: str | None = None
    worker_store: str | None = None
    chunks: str = ""
    chunk_store: str = ""

    def __post_init__(self) -> None:
        if self.worker_store is not None and self.store is None:
            raise ValueError("worker_store is another way to the database that store names")
        if bool(self.chunks) != bool(self.chunk_store):
            raise ValueError("chunks and chunk_store are given together or not at all")


@dataclass(frozen=True, slots=True)
class CellTable:
    """One of ``[[cluster.cells]]``: a broker, and the workers that listen to it.

    Attributes:
        name: the broker's host, and port, as devices are told it.
        broker: its URL, for workers and the coordinator (default: the cell's name, reached as
            broker.url says).
        workers: processes that take updates in.
    """

    name: str
    broker: str | None = None
    workers: Annotated[int, Within(1, MOST_WORKERS)] = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """``name``: what devices are told; empty for the only one where none are listed, whose
    ``broker`` is None: the fleet's."""

    name: str
    broker: BrokerUrl | None
    workers: int


class WorkerSlot(NamedTuple):
    """A worker's place: ``place`` among the ``of`` workers of its cell."""

    number: int
    cell: Cell
    place: int
    of: int

    def shards(self) -> range:
        """What it listens to on its cell's broker: devices connect to a cell that is not theirs,
        too, until they are told theirs."""
        return range(self.place, SHARDS, self.of)

    def __str__(self) -> str:
        cell = f"cell {self.cell.name}, " if self.cell.name else ""
        return f"{self.number} ({cell}{self.place + 1} of {self.of})"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A whole table. ``store``: a URL, or None for the home's file; ``worker_store``: another for
    workers, or None for the same; the others as in
    :class:`ClusterTable`."""

    cells: tuple[Cell, ...] = (Cell("", None, 2),)
    store: str | None = None
    chunks: str = ""
    chunk_store: str = ""
    worker_store: str | None = None

    def slots(self) -> list[WorkerSlot]:
        """All workers' places."""
        found: list[WorkerSlot] = []
        for cell in self.cells:
            for place in range(cell.workers):
                found.append(WorkerSlot(len(found), cell, place, cell.workers))
        return found

    def cell_of(self, shard: int) -> str:
        """The cell that a shard's devices belong to: each has shards by its workers' number."""
        total = sum(cell.workers for cell in self.cells)
        worker = shard * total // SHARDS
        for cell in self.cells:
            if worker < cell.workers:
                return cell.name
            worker -= cell.workers
        raise ValueError(f"shard {shard} is not below {SHARDS}")


def read_cluster(table: TomlTable, fleet: BrokerUrl) -> Cluster:
    """``fleet``: what the table ``[broker]`` says. Raises TaskError, naming the key."""
    listed = table.take("cells", [])
    said = "workers" in table
    read = table.read(ClusterTable)
    for name, url in (("store", read.store), ("worker_store", read.worker_store)):
        if url is not None and not re.match(r"postgres(ql)?://", url):
            raise table.error(
                name,
                "is no URL such as postgresql://user@host/database; without it "
                + ("the home's own file is the store" if name == "store" else "it is store's"),
            )
    if read.chunks:
        try:
            parse_mirror_url(read.chunks)
            Placement(0, mirror=read.chunks)  # as devices are told
        except ValueError as error:
            raise table.error("chunks", f"is not usable: {error}") from None
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise table.error("cells", "must be tables, [[cluster.cells]] each")
    if listed and said:
        raise table.error("workers", "is given, and each of [[cluster.cells]] has its own")
    cells = tuple(_cells(listed, table, fleet)) or (Cell("", None, read.workers),)
    if sum(each.workers for each in cells) > MOST_WORKERS:
        raise table.error("cells", f"have more than {MOST_WORKERS} workers together")
    return Cluster(cells, read.store, read.chunks, read.chunk_store, read.worker_store)


def _cells(
    listed: Sequence[dict[str, object]], table: TomlTable, fleet: BrokerUrl
) -> Iterator[Cell]:
    names: set[str] = set()
    places: set[tuple[str, int, str | None]] = set()
    for number, values in enumerate(listed, 1):
        one = TomlTable(values, table.name(f"cells #{number}"))
        read = one.read(CellTable)
        try:
            split_cell(read.name)
        except ValueError as error:
            raise one.error("name", f"is not usable: {error}") from None
        if read.name in names:
            raise one.error("name", f"is {read.name!r}, as of a cell before it")
        names.add(read.name)
        try:
            url = broker_of(read, fleet)
        except ValueError as error:
            raise one.error("broker", f"is not usable: {error}") from None
        if (place := (url.host, url.port, url.path)) in places:
            raise one.error(
                "broker", f"is {url}, as of a cell before it: each cell has a broker of its own"
            )
        places.add(place)
        yield Cell(read.name, url, read.workers)


def broker_of(cell: CellTable, fleet: BrokerUrl) -> BrokerUrl:
    """Where coordinator and workers find a cell's broker: at its name, as devices do, or where the
    table says; with the fleet's user and password where it says none. Raises ValueError."""
    if cell.broker is None:
        return fleet.at(*split_cell(cell.name))
    return parse_broker_url(cell.broker)
