"""Graph networks: torch-geometric's own, and adjacency by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.export_survey.subject import Batch, Kind, TrainStep

KIND = Kind("graphs")

NODES, EDGES, FEATURES, CLASSES = 40, 160, 12, 4


def _graph() -> Batch:
    return {
        "x": torch.randn(NODES, FEATURES),
        "edge_index": torch.randint(NODES, (2, EDGES)),
        "y": torch.randint(CLASSES, (NODES,)),
        "mask": torch.rand(NODES) < 0.5,
    }


def _nodes(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch["x"], batch["edge_index"])
    weights = batch["mask"].float()
    losses = F.cross_entropy(out, batch["y"], reduction="none")
    return (losses * weights).sum() / weights.sum()


_FREE = {"x": {0: "nodes"}, "y": {0: "nodes"}, "mask": {0: "nodes"}, "edge_index": {1: "edges"}}


def _pyg(name: str, free: bool = False, **given: Any) -> Callable[[], TrainStep]:
    def write() -> TrainStep:
        import torch_geometric.nn as pyg

        model = getattr(pyg, name)(FEATURES, 16, num_layers=2, out_channels=CLASSES, **given)
        return TrainStep(model, _nodes, _graph(), dynamic=_FREE if free else {})

    return write


KIND.add("GCN (PyG)", "torch_geometric")(_pyg("GCN", dropout=0.5))
KIND.add("GCN (PyG), free edges", "torch_geometric")(_pyg("GCN", True))
KIND.add("GraphSAGE (PyG)", "torch_geometric")(_pyg("GraphSAGE"))
KIND.add("GIN (PyG)", "torch_geometric")(_pyg("GIN", norm="batch_norm"))
KIND.add("GAT (PyG)", "torch_geometric")(_pyg("GAT", heads=2, dropout=0.2))
KIND.add("GATv2 (PyG)", "torch_geometric")(_pyg("GAT", v2=True, heads=2))
KIND.add("PNA (PyG)", "torch_geometric")(
    _pyg("PNA", aggregators=["mean", "max", "std"], scalers=["identity", "amplification"],
         deg=torch.tensor([0, 5, 20, 10, 5]))
)  # fmt: skip


@KIND.add("GIN, graphs pooled (PyG)", "torch_geometric")
def pooled() -> TrainStep:
    import torch_geometric.nn as pyg

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gnn = pyg.GIN(FEATURES, 16, num_layers=2)
            self.out = nn.Linear(16, CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
            h = pyg.global_mean_pool(self.gnn(x, edge_index), graph, 8)
            return self.out(F.dropout(h, 0.5, self.training))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"], batch["edge_index"], batch["graph"])
        return F.cross_entropy(out, batch["label"])

    graph = torch.arange(NODES) // (NODES // 8)
    edges = torch.randint(NODES // 8, (2, EDGES)) + torch.randint(8, (EDGES,)) * (NODES // 8)
    batch = {
        "x": torch.randn(NODES, FEATURES),
        "edge_index": edges,
        "graph": graph,
        "label": torch.randint(CLASSES, (8,)),
    }
    return TrainStep(Model(), loss, batch, dynamic={})


@KIND.add("LightGCN (PyG)", "torch_geometric")
def lightgcn() -> TrainStep:
    from torch_geometric.nn import LightGCN

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        index = torch.cat([batch["pos"], batch["neg"]], 1)
        pos, neg = model(batch["edge_index"], index).chunk(2)
        return model.recommendation_loss(pos, neg, node_id=index.unique())

    batch = {
        "edge_index": torch.randint(NODES, (2, EDGES)),
        "pos": torch.randint(NODES, (2, 20)),
        "neg": torch.randint(NODES, (2, 20)),
    }

    def plain(model: nn.Module, batch: Batch) -> Tensor:
        index = torch.cat([batch["pos"], batch["neg"]], 1)
        pos, neg = model(batch["edge_index"], index).chunk(2)
        return -F.logsigmoid(pos - neg).mean()

    return TrainStep(LightGCN(NODES, 16, 2), plain, batch, dynamic={})


class GraphConvolution(nn.Module):
    """Kipf and Welling 2017, as pygcn has it."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(before, after))
        self.bias = nn.Parameter(torch.empty(after))
        bound = after**-0.5
        self.weight.data.uniform_(-bound, bound)
        self.bias.data.uniform_(-bound, bound)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return torch.spmm(adj, torch.mm(x, self.weight)) + self.bias


class PyGCN(nn.Module):
    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(FEATURES, 16), GraphConvolution(16, CLASSES)
        self.register_buffer("adj", adjacency)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.gc1(x, self.adj))
        x = F.dropout(x, 0.5, training=self.training)
        return F.log_softmax(self.gc2(x, self.adj), dim=1)


def _pygcn(sparse: bool) -> TrainStep:
    a = (torch.rand(NODES, NODES) < 0.1).float() + torch.eye(NODES)
    a = ((a + a.t()) > 0).float()
    a = a / a.sum(1, keepdim=True)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        return F.nll_loss(out[batch["train"]], batch["y"][batch["train"]])

    graph = _graph()
    batch = {"x": graph["x"], "y": graph["y"], "train": torch.randperm(NODES)[:20]}
    return TrainStep(PyGCN(a.to_sparse() if sparse else a), loss, batch, dynamic={})


KIND.add("pygcn, sparse adjacency")(lambda: _pygcn(True))
KIND.add("pygcn, dense adjacency")(lambda: _pygcn(False))


class DenseGAT(nn.Module):
    """Velickovic et al. 2018, as pyGAT: masked attention over all pairs."""

    def __init__(self, heads: int = 2, hidden: int = 8) -> None:
        super().__init__()
        self.w = nn.ParameterList(
            nn.Parameter(nn.init.xavier_uniform_(torch.empty(FEATURES, hidden), 1.414))
            for _ in range(heads)
        )
        self.a = nn.ParameterList(
            nn.Parameter(nn.init.xavier_uniform_(torch.empty(2 * hidden, 1), 1.414))
            for _ in range(heads)
        )
        self.hidden, self.out = hidden, nn.Linear(heads * hidden, CLASSES)

    def head(self, x: Tensor, adj: Tensor, w: Tensor, a: Tensor) -> Tensor:
        wh = torch.mm(x, w)
        e1, e2 = torch.matmul(wh, a[: self.hidden, :]), torch.matmul(wh, a[self.hidden :, :])
        e = F.leaky_relu(e1 + e2.T, 0.2)
        zero_vec = -9e15 * torch.ones_like(e)
        attention = F.softmax(torch.where(adj > 0, e, zero_vec), dim=1)
        attention = F.dropout(attention, 0.3, training=self.training)
        return F.elu(torch.matmul(attention, wh))

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = torch.cat([self.head(x, adj, w, a) for w, a in zip(self.w, self.a)], dim=1)
        return F.log_softmax(self.out(x), dim=1)


@KIND.add("pyGAT")
def pygat() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.nll_loss(model(batch["x"], batch["adj"]), batch["y"])

    adj = (torch.rand(NODES, NODES) < 0.2).float() + torch.eye(NODES)
    batch = {"x": torch.randn(NODES, FEATURES), "adj": adj, "y": torch.randint(CLASSES, (NODES,))}
    return TrainStep(DenseGAT(), loss, batch, dynamic={})


class EGNN(nn.Module):
    """Satorras et al. 2021: messages by index_add, coordinates moved."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.edge_mlp = nn.Sequential(
            nn.Linear(2 * FEATURES + 1, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU()
        )
        self.node_mlp = nn.Sequential(
            nn.Linear(hidden + FEATURES, hidden), nn.SiLU(), nn.Linear(hidden, 1)
        )
        self.coord_mlp = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, h: Tensor, coord: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        row, col = edge_index
        diff = coord[row] - coord[col]
        radial = torch.sum(diff**2, 1).unsqueeze(1)
        edge = self.edge_mlp(torch.cat([h[row], h[col], radial], dim=1))
        trans = diff * self.coord_mlp(edge)
        total = coord.new_zeros(coord.size(0), 3)
        index = row.unsqueeze(-1).expand(-1, 3)
        total.scatter_add_(0, index, trans)
        count = torch.zeros_like(total).scatter_add_(0, index, torch.ones_like(trans))
        coord = coord + total / count.clamp(min=1)
        agg = torch.zeros(h.size(0), edge.size(1)).index_add_(0, row, edge)
        return self.node_mlp(torch.cat([h, agg], dim=1)), coord


@KIND.add("EGNN")
def egnn() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out, coord = model(batch["x"], batch["coord"], batch["edge_index"])
        return F.mse_loss(out.squeeze(1), batch["energy"]) + F.mse_loss(coord, batch["moved"])

    batch = {
        "x": torch.randn(NODES, FEATURES),
        "coord": torch.randn(NODES, 3),
        "moved": torch.randn(NODES, 3),
        "energy": torch.randn(NODES),
        "edge_index": torch.randint(NODES, (2, EDGES)),
    }
    return TrainStep(EGNN(), loss, batch, dynamic={})
