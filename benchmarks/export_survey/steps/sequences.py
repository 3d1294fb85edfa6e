"""Recommendation from sequences of items."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.export_survey.subject import Batch, Kind, TrainStep

KIND = Kind("sequence recommendation")

ITEMS, LENGTH, ROWS, DIM = 100, 12, 16, 32


def _histories() -> Tensor:
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1))
    shown = torch.arange(LENGTH).flip(0) < lengths
    return torch.randint(1, ITEMS, (ROWS, LENGTH)) * shown


class PointWiseFeedForward(nn.Module):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(hidden, hidden, kernel_size=1)
        self.dropout1 = nn.Dropout(p=dropout)
        self.conv2 = nn.Conv1d(hidden, hidden, kernel_size=1)
        self.dropout2 = nn.Dropout(p=dropout)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.dropout1(self.conv1(x.transpose(-1, -2))))
        out = self.dropout2(self.conv2(out)).transpose(-1, -2)
        return out + x


class SASRec(nn.Module):
    def __init__(self, blocks: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS + 1, DIM, padding_idx=0)
        self.pos_emb = nn.Embedding(LENGTH + 1, DIM, padding_idx=0)
        self.emb_dropout = nn.Dropout(dropout)
        self.attention_layernorms = nn.ModuleList()
        self.attention_layers = nn.ModuleList()
        self.forward_layernorms = nn.ModuleList()
        self.forward_layers = nn.ModuleList()
        self.last_layernorm = nn.LayerNorm(DIM, eps=1e-8)
        for _ in range(blocks):
            self.attention_layernorms.append(nn.LayerNorm(DIM, eps=1e-8))
            self.attention_layers.append(nn.MultiheadAttention(DIM, 1, dropout))
            self.forward_layernorms.append(nn.LayerNorm(DIM, eps=1e-8))
            self.forward_layers.append(PointWiseFeedForward(DIM, dropout))

    def log2feats(self, log_seqs: Tensor) -> Tensor:
        seqs = self.item_emb(log_seqs)
        seqs *= self.item_emb.embedding_dim**0.5
        poss = torch.from_numpy(
            np.tile(np.arange(1, log_seqs.shape[1] + 1), [log_seqs.shape[0], 1])
        )
        poss = poss * (log_seqs != 0)
        seqs += self.pos_emb(poss)
        seqs = self.emb_dropout(seqs)
        tl = seqs.shape[1]
        attention_mask = ~torch.tril(torch.ones((tl, tl), dtype=torch.bool))
        for i in range(len(self.attention_layers)):
            seqs = torch.transpose(seqs, 0, 1)
            q = self.attention_layernorms[i](seqs)
            mha, _ = self.attention_layers[i](q, seqs, seqs, attn_mask=attention_mask)
            seqs = torch.transpose(q + mha, 0, 1)
            seqs = self.forward_layers[i](self.forward_layernorms[i](seqs))
        return self.last_layernorm(seqs)

    def forward(self, log_seqs: Tensor, pos: Tensor, neg: Tensor) -> tuple[Tensor, Tensor]:
        feats = self.log2feats(log_seqs)
        return (
            (feats * self.item_emb(pos)).sum(dim=-1),
            (feats * self.item_emb(neg)).sum(dim=-1),
        )


def _sasrec_loss(model: nn.Module, batch: Batch) -> Tensor:
    pos_logits, neg_logits = model(batch["seq"], batch["pos"], batch["neg"])
    kept = (batch["pos"] != 0).float()
    bce = nn.BCEWithLogitsLoss(reduction="none")
    loss = bce(pos_logits, torch.ones_like(pos_logits)) * kept
    loss = loss + bce(neg_logits, torch.zeros_like(neg_logits)) * kept
    return loss.sum() / kept.sum()


def _with_negatives() -> Batch:
    seq = _histories()
    pos = torch.cat([seq[:, 1:], torch.randint(1, ITEMS, (ROWS, 1))], 1)
    return {"seq": seq, "pos": pos, "neg": torch.randint(1, ITEMS, (ROWS, LENGTH))}


class FreeSASRec(SASRec):
    """The same with positions from the tensor's size."""

    def log2feats(self, log_seqs: Tensor) -> Tensor:
        seqs = self.item_emb(log_seqs) * DIM**0.5
        positions = torch.arange(1, log_seqs.shape[1] + 1).unsqueeze(0).expand_as(log_seqs)
        seqs = self.emb_dropout(seqs + self.pos_emb(positions * (log_seqs != 0)))
        tl = seqs.shape[1]
        mask = ~torch.tril(torch.ones((tl, tl), dtype=torch.bool))
        for norm, attention, second, feed in zip(
            self.attention_layernorms, self.attention_layers,
            self.forward_layernorms, self.forward_layers,
        ):  # fmt: skip
            q = norm(seqs).transpose(0, 1)
            seqs = seqs.transpose(0, 1)
            mixed, _ = attention(q, seqs, seqs, attn_mask=mask)
            seqs = feed(second((q + mixed).transpose(0, 1)))
        return self.last_layernorm(seqs)


@KIND.add("SASRec")
def sasrec() -> TrainStep:
    return TrainStep(FreeSASRec(), _sasrec_loss, _with_negatives())


@KIND.add("SASRec, positions by numpy, fixed batch")
def sasrec_fixed() -> TrainStep:
    return TrainStep(SASRec(), _sasrec_loss, _with_negatives(), dynamic={})


class BERT4Rec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(ITEMS + 2, DIM, padding_idx=0)
        self.position = nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(
            DIM, 2, DIM * 4, dropout=0.1, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.norm = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, ITEMS + 1)

    def forward(self, x: Tensor) -> Tensor:
        p = self.position.weight.unsqueeze(0).repeat(x.size(0), 1, 1)
        h = F.dropout(self.norm(self.token(x) + p), 0.1, self.training)
        return self.out(self.encoder(h, src_key_padding_mask=x == 0))


@KIND.add("BERT4Rec")
def bert4rec() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["seq"])
        return F.cross_entropy(
            logits.view(-1, logits.size(-1)), batch["labels"].view(-1), ignore_index=0
        )

    seq = _histories()
    masked = (torch.rand(ROWS, LENGTH) < 0.3) & (seq > 0)
    masked[:, -1] = True
    batch = {"seq": seq.masked_fill(masked, ITEMS + 1), "labels": seq * masked}
    return TrainStep(BERT4Rec(), loss, batch)


class GRU4Rec(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.emb = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.drop = nn.Dropout(0.25)
        self.gru = nn.GRU(DIM, 48, num_layers=1, batch_first=True)
        self.b = nn.Linear(48, DIM)

    def forward(self, seq: Tensor, lengths: Tensor) -> Tensor:
        e = self.drop(self.emb(seq))
        if self.packed:
            packed = nn.utils.rnn.pack_padded_sequence(
                e, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            _, h = self.gru(packed)
            last = h[-1]
        else:
            out, _ = self.gru(e)
            index = (lengths - 1).view(-1, 1, 1).expand(-1, -1, out.size(2))
            last = out.gather(1, index).squeeze(1)
        return self.b(last) @ self.emb.weight.t()


def _gru4rec(packed: bool) -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["seq"], batch["length"]), batch["next"])

    batch = {
        "seq": torch.randint(1, ITEMS, (ROWS, LENGTH)),
        "length": torch.randint(2, LENGTH + 1, (ROWS,)),
        "next": torch.randint(1, ITEMS, (ROWS,)),
    }
    return TrainStep(GRU4Rec(packed), loss, batch)


KIND.add("GRU4Rec")(lambda: _gru4rec(False))
KIND.add("GRU4Rec, packed")(lambda: _gru4rec(True))


class Caser(nn.Module):
    """Tang and Wang 2018: horizontal and vertical convolutions."""

    def __init__(self, users: int = 20, n_h: int = 8, n_v: int = 4) -> None:
        super().__init__()
        self.user_embeddings = nn.Embedding(users, DIM)
        self.item_embeddings = nn.Embedding(ITEMS, DIM)
        self.conv_v = nn.Conv2d(1, n_v, (LENGTH, 1))
        self.conv_h = nn.ModuleList(nn.Conv2d(1, n_h, (i, DIM)) for i in range(1, LENGTH + 1, 3))
        self.fc1 = nn.Linear(n_v * DIM + n_h * len(self.conv_h), DIM)
        self.W2 = nn.Embedding(ITEMS, 2 * DIM)
        self.b2 = nn.Embedding(ITEMS, 1)
        for embedding in (self.user_embeddings, self.item_embeddings, self.W2):
            embedding.weight.data.normal_(0, 1.0 / embedding.embedding_dim)
        self.b2.weight.data.zero_()
        self.dropout = nn.Dropout(0.5)

    def forward(self, seq: Tensor, user: Tensor, items: Tensor) -> Tensor:
        e = self.item_embeddings(seq).unsqueeze(1)
        out_v = self.conv_v(e).view(-1, self.conv_v.out_channels * DIM)
        out_hs = []
        for conv in self.conv_h:
            conv_out = F.relu(conv(e).squeeze(3))
            out_hs.append(F.max_pool1d(conv_out, conv_out.size(2)).squeeze(2))
        out = self.dropout(torch.cat([out_v, torch.cat(out_hs, 1)], 1))
        z = F.relu(self.fc1(out))
        x = torch.cat([z, self.user_embeddings(user)], 1)
        return torch.baddbmm(self.b2(items), self.W2(items), x.unsqueeze(2)).squeeze(-1)


@KIND.add("Caser")
def caser() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["seq"], batch["user"], torch.cat([batch["pos"], batch["neg"]], 1))
        pos, neg = torch.split(scores, [batch["pos"].size(1), batch["neg"].size(1)], dim=1)
        positive = -torch.mean(torch.log(torch.sigmoid(pos)))
        return positive - torch.mean(torch.log(1 - torch.sigmoid(neg)))

    batch = {
        "seq": torch.randint(ITEMS, (ROWS, LENGTH)),
        "user": torch.randint(20, (ROWS,)),
        "pos": torch.randint(ITEMS, (ROWS, 2)),
        "neg": torch.randint(ITEMS, (ROWS, 4)),
    }
    return TrainStep(Caser(), loss, batch)
