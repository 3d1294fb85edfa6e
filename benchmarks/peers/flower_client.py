"""Flower's half of a device: see ``flower_rounds``. A module that Ray's workers import."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.peers.workload import Workload, device_step

client = ClientApp()


@cache
def _workload(path: str) -> Workload:
    # Once in each of Ray's workers.
    return Workload.load(Path(path))


@client.train()
def train(message: Message, context: Context) -> Message:
    """One step of the node's user on its triples."""
    told = message.content.config_records["config"]
    work = _workload(str(told["workload"]))
    number, device = int(told["server-round"]) - 1, int(context.node_config["partition-id"])
    part = work.part(device)
    user = work.users[device]
    if "user" in context.state:
        (user,) = context.state.array_records["user"].to_numpy_ndarrays()
    (items,) = message.content.array_records["arrays"].to_numpy_ndarrays()
    moved, rows, gradient = device_step(
        items,
        user,
        (work.positive[part], work.negative[number][part], work.weight[part]),
        work.user_rates[device],
        work.user_l2,
        work.item_l2,
    )
    context.state["user"] = ArrayRecord([moved])
    whole = np.zeros_like(items)
    whole[rows] = gradient
    reply = {"arrays": ArrayRecord([whole]), "metrics": MetricRecord({"num-examples": 1})}
    return Message(content=RecordDict(reply), reply_to=message)
