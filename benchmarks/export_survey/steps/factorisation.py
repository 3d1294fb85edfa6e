"""Matrix factorisation and its heirs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.export_survey.subject import Batch, Kind, TrainStep

KIND = Kind("factorisation")

USERS, ITEMS, ROWS = 60, 100, 64


def _ratings() -> Batch:
    return {
        "user": torch.randint(USERS, (ROWS,)),
        "item": torch.randint(ITEMS, (ROWS,)),
        "rating": torch.randint(1, 6, (ROWS,)).float(),
    }


def _triples() -> Batch:
    return {
        "user": torch.randint(USERS, (ROWS,)),
        "pos": torch.randint(ITEMS, (ROWS,)),
        "neg": torch.randint(ITEMS, (ROWS,)),
    }


class BPR(nn.Module):
    def __init__(self, k: int = 32) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(USERS, k))
        self.H = nn.Parameter(torch.empty(ITEMS, k))
        nn.init.xavier_normal_(self.W.data)
        nn.init.xavier_normal_(self.H.data)

    def forward(self, u: Tensor, i: Tensor, j: Tensor) -> Tensor:
        u, i, j = self.W[u, :], self.H[i, :], self.H[j, :]
        x_uij = torch.mul(u, i).sum(dim=1) - torch.mul(u, j).sum(dim=1)
        log_prob = F.logsigmoid(x_uij).sum()
        reg = 0.025 * (
            u.norm(dim=1).pow(2).sum() + i.norm(dim=1).pow(2).sum() + j.norm(dim=1).pow(2).sum()
        )
        return -log_prob + reg


@KIND.add("BPR-MF")
def bpr() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["user"], batch["pos"], batch["neg"])

    return TrainStep(BPR(), loss, _triples())


class NeuMF(nn.Module):
    def __init__(self, k: int = 8) -> None:
        super().__init__()
        self.gmf_user, self.gmf_item = nn.Embedding(USERS, k), nn.Embedding(ITEMS, k)
        self.mlp_user, self.mlp_item = nn.Embedding(USERS, 2 * k), nn.Embedding(ITEMS, 2 * k)
        self.fc_layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip((4 * k, 2 * k), (2 * k, k)))
        self.affine_output = nn.Linear(2 * k, 1)

    def forward(self, u: Tensor, i: Tensor) -> Tensor:
        mlp = torch.cat([self.mlp_user(u), self.mlp_item(i)], dim=-1)
        gmf = torch.mul(self.gmf_user(u), self.gmf_item(i))
        for layer in self.fc_layers:
            mlp = F.relu(layer(F.dropout(mlp, 0.2, self.training)))
        return torch.sigmoid(self.affine_output(torch.cat([mlp, gmf], dim=-1))).view(-1)


@KIND.add("NeuMF")
def neumf() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.BCELoss()(model(batch["user"], batch["item"]), (batch["rating"] > 3).float())

    return TrainStep(NeuMF(), loss, _ratings())


def _adjacency() -> Tensor:
    """The normalised bipartite graph, sparse."""
    pairs = torch.stack([torch.randint(USERS, (400,)), torch.randint(ITEMS, (400,)) + USERS])
    both = torch.cat([pairs, pairs.flip(0)], 1)
    n = USERS + ITEMS
    a = torch.sparse_coo_tensor(both, torch.ones(both.shape[1]), (n, n)).coalesce()
    degree = torch.sparse.sum(a, 1).to_dense().clamp(min=1).pow(-0.5)
    i, j = a.indices()
    return torch.sparse_coo_tensor(a.indices(), degree[i] * degree[j], (n, n)).coalesce()


class LightGCN(nn.Module):
    def __init__(self, k: int = 16, layers: int = 3, registered: bool = False) -> None:
        super().__init__()
        self.embedding_user = nn.Embedding(USERS, k)
        self.embedding_item = nn.Embedding(ITEMS, k)
        nn.init.normal_(self.embedding_user.weight, std=0.1)
        nn.init.normal_(self.embedding_item.weight, std=0.1)
        self.n_layers = layers
        if registered:
            self.register_buffer("graph", _adjacency().to_dense())
        else:
            self.graph = _adjacency()

    def computer(self) -> tuple[Tensor, Tensor]:
        all_emb = torch.cat([self.embedding_user.weight, self.embedding_item.weight])
        embs = [all_emb]
        for _ in range(self.n_layers):
            all_emb = (
                torch.sparse.mm(self.graph, all_emb)
                if self.graph.is_sparse
                else self.graph @ all_emb
            )
            embs.append(all_emb)
        light_out = torch.mean(torch.stack(embs, dim=1), dim=1)
        users, items = torch.split(light_out, [USERS, ITEMS])
        return users, items

    def bpr_loss(self, users: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
        all_users, all_items = self.computer()
        u, p, n = all_users[users], all_items[pos], all_items[neg]
        ego = [self.embedding_user(users), self.embedding_item(pos), self.embedding_item(neg)]
        reg = 0.5 * sum(e.norm(2).pow(2) for e in ego) / users.shape[0]
        pos_scores, neg_scores = torch.sum(u * p, dim=1), torch.sum(u * n, dim=1)
        return torch.mean(F.softplus(neg_scores - pos_scores)) + 1e-4 * reg


def _lightgcn(registered: bool) -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model.bpr_loss(batch["user"], batch["pos"], batch["neg"])

    return TrainStep(LightGCN(registered=registered), loss, _triples())


KIND.add("LightGCN, sparse adjacency")(lambda: _lightgcn(False))
KIND.add("LightGCN, dense adjacency")(lambda: _lightgcn(True))


class AutoRec(nn.Module):
    def __init__(self, n: int, hidden: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(n, hidden), nn.Sigmoid(), nn.Dropout(0.05))
        self.decoder = nn.Linear(hidden, n)

    def forward(self, x: Tensor) -> Tensor:
        pred = self.decoder(self.encoder(x))
        return pred * torch.sign(x) if self.training else pred


@KIND.add("AutoRec")
def autorec() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        weights = sum(p.pow(2).sum() for n, p in model.named_parameters() if "weight" in n)
        return ((model(batch["x"]) - batch["x"]) ** 2).sum() + 1e-3 * weights

    x = torch.randint(1, 6, (16, ITEMS)).float() * (torch.rand(16, ITEMS) < 0.2)
    return TrainStep(AutoRec(ITEMS), loss, {"x": x})


class MetricLearning(nn.Module):
    """Collaborative metric learning: distances and the rank's weight."""

    def __init__(self, k: int = 16) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, k), nn.Embedding(ITEMS, k)

    def forward(self, u: Tensor, p: Tensor, n: Tensor) -> Tensor:
        u, p, n = self.user(u), self.item(p), self.item(n)
        near = torch.sum((u - p) ** 2, 1)
        far = torch.cdist(u.unsqueeze(1), n).squeeze(1) ** 2
        impostors = (near.unsqueeze(1) - far + 0.5) > 0
        rank = torch.mean(impostors.float(), dim=1) * ITEMS
        hinge = torch.clamp(near - far.min(dim=1).values + 0.5, min=0)
        return torch.sum(torch.log(rank + 1) * hinge)


@KIND.add("CML with cdist")
def metric_learning() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["user"], batch["pos"], batch["neg"])

    batch = {**_triples(), "neg": torch.randint(ITEMS, (ROWS, 10))}
    return TrainStep(MetricLearning(), loss, batch)
