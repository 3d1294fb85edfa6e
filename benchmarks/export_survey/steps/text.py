"""Language models: transformers with random weights, and small ones by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.export_survey.subject import Batch, Kind, TrainStep

KIND = Kind("text")

WORDS, LENGTH, ROWS = 200, 16, 4

_BOTH = {0: "batch", 1: "length"}


def _tokens() -> Tensor:
    return torch.randint(4, WORDS, (ROWS, LENGTH))


def _mask() -> Tensor:
    lengths = torch.randint(5, LENGTH + 1, (ROWS, 1))
    return (torch.arange(LENGTH) < lengths).long()


def _classifier(
    config: str, free: bool = False, own_loss: bool = True, **given: Any
) -> Callable[[], TrainStep]:
    """``AutoModelForSequenceClassification`` of a small configuration, with the package's loss."""

    def write() -> TrainStep:
        import transformers

        made = getattr(transformers, config)(vocab_size=WORDS, num_labels=3, **given)
        model = transformers.AutoModelForSequenceClassification.from_config(made)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            labels = batch["label"] if own_loss else None
            out = model(input_ids=batch["ids"], attention_mask=batch["mask"], labels=labels)
            return out.loss if own_loss else F.cross_entropy(out.logits, batch["label"])

        batch = {"ids": _tokens(), "mask": _mask(), "label": torch.randint(3, (ROWS,))}
        axes = {"ids": _BOTH, "mask": _BOTH, "label": {0: "batch"}} if free else None
        return TrainStep(model, loss, batch, dynamic=axes)

    return write


_BERT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
for _title, _config, _given in (
    ("BERT-tiny", "BertConfig", _BERT),
    ("RoBERTa", "RobertaConfig", {**_BERT, "pad_token_id": 1}),
    ("ALBERT", "AlbertConfig", {**_BERT, "embedding_size": 16}),
    ("ELECTRA", "ElectraConfig", {**_BERT, "embedding_size": 16}),
    ("DistilBERT", "DistilBertConfig",
     {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 64}),
    ("MobileBERT", "MobileBertConfig",
     {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
      "intra_bottleneck_size": 32, "embedding_size": 16, "max_position_embeddings": 64}),
    ("SqueezeBERT", "SqueezeBertConfig", {**_BERT, "embedding_size": 32}),
    ("XLNet", "XLNetConfig", {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}),
    ("ModernBERT", "ModernBertConfig",
     {**_BERT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
      "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 8}),
    ("FNet", "FNetConfig",
     {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64,
      "max_position_embeddings": 64}),
    ("Funnel", "FunnelConfig",
     {"d_model": 32, "block_sizes": [1, 1], "n_head": 2, "d_head": 16, "d_inner": 64}),
):  # fmt: skip
    KIND.add(f"{_title} classifier", "transformers")(_classifier(_config, **_given))
_DEBERTA = {
    **_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": 16,
}  # fmt: skip
# The package's loss drops rows whose label is negative, and branches on how many are left.
KIND.add("DeBERTa-V2 classifier, the package's loss", "transformers")(
    _classifier("DebertaV2Config", **_DEBERTA)
)
KIND.add("DeBERTa-V2 classifier", "transformers")(
    _classifier("DebertaV2Config", own_loss=False, **_DEBERTA)
)
KIND.add("BERT-tiny classifier, free length", "transformers")(
    _classifier("BertConfig", True, **_BERT)
)


@KIND.add("BERT-tiny, masked words", "transformers")
def bert_mlm() -> TrainStep:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(vocab_size=WORDS, **_BERT))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(
            input_ids=batch["ids"], attention_mask=batch["mask"], labels=batch["labels"]
        ).loss

    ids = _tokens()
    labels = ids.masked_fill(torch.rand(ROWS, LENGTH) > 0.3, -100)
    labels[:, 0] = ids[:, 0]
    batch = {"ids": ids, "mask": torch.ones_like(ids), "labels": labels}
    return TrainStep(model, loss, batch)


@KIND.add("BERT-tiny, questions", "transformers")
def bert_qa() -> TrainStep:
    from transformers import BertConfig, BertForQuestionAnswering

    model = BertForQuestionAnswering(BertConfig(vocab_size=WORDS, **_BERT))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(
            input_ids=batch["ids"], start_positions=batch["start"], end_positions=batch["end"]
        ).loss

    batch = {"ids": _tokens(), **{n: torch.randint(LENGTH, (ROWS,)) for n in ("start", "end")}}
    return TrainStep(model, loss, batch)


@KIND.add("BERT-tiny, tags", "transformers")
def bert_tags() -> TrainStep:
    from transformers import BertConfig, BertForTokenClassification

    model = BertForTokenClassification(BertConfig(vocab_size=WORDS, num_labels=5, **_BERT))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(input_ids=batch["ids"], labels=batch["labels"]).loss

    batch = {"ids": _tokens(), "labels": torch.randint(5, (ROWS, LENGTH))}
    return TrainStep(model, loss, batch)


def _causal(config: str, free: bool = False, **given: Any) -> Callable[[], TrainStep]:
    def write() -> TrainStep:
        import transformers

        made = getattr(transformers, config)(
            vocab_size=WORDS, bos_token_id=1, eos_token_id=2, pad_token_id=0, **given
        )
        model = transformers.AutoModelForCausalLM.from_config(made)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return model(input_ids=batch["ids"], labels=batch["ids"], use_cache=False).loss

        return TrainStep(model, loss, {"ids": _tokens()}, dynamic={"ids": _BOTH} if free else None)

    return write


_DECODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
for _title, _config, _given in (
    ("GPT-2 tiny", "GPT2Config", _GPT2),
    ("Llama tiny", "LlamaConfig", _GROUPED),
    ("Mistral tiny", "MistralConfig", {**_GROUPED, "sliding_window": 8}),
    ("Qwen2 tiny", "Qwen2Config", _GROUPED),
    ("Qwen3 tiny", "Qwen3Config", {**_GROUPED, "head_dim": 8}),
    ("Gemma tiny", "GemmaConfig", {**_GROUPED, "head_dim": 8}),
    ("Phi tiny", "PhiConfig", _DECODER),
    ("GPT-NeoX tiny", "GPTNeoXConfig", _DECODER),
    ("OPT tiny", "OPTConfig",
     {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64,
      "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    ("BLOOM tiny", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    ("Mixtral tiny", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    ("Mamba tiny", "MambaConfig", {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}),
    ("RecurrentGemma tiny", "RecurrentGemmaConfig",
     {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64,
      "lru_width": 32, "attention_window_size": 8}),
):  # fmt: skip
    KIND.add(_title, "transformers")(_causal(_config, **_given))
KIND.add("GPT-2 tiny, free length", "transformers")(_causal("GPT2Config", True, **_GPT2))
KIND.add("Llama tiny, free length", "transformers")(_causal("LlamaConfig", True, **_GROUPED))


def _translation(config: str, **given: Any) -> Callable[[], TrainStep]:
    def write() -> TrainStep:
        import transformers

        made = getattr(transformers, config)(
            vocab_size=WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=0, **given,
        )  # fmt: skip
        model = transformers.AutoModelForSeq2SeqLM.from_config(made)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return model(
                input_ids=batch["ids"], attention_mask=batch["mask"], labels=batch["labels"]
            ).loss

        batch = {"ids": _tokens(), "mask": _mask(), "labels": _tokens()[:, :8].contiguous()}
        return TrainStep(model, loss, batch)

    return write


KIND.add("T5 tiny", "transformers")(
    _translation("T5Config", d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
)
KIND.add("BART tiny", "transformers")(
    _translation(
        "BartConfig", d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=64, forced_eos_token_id=2,
    )
)  # fmt: skip


# By hand.


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int, block: int, flash: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.n_head, self.n_embd, self.flash = n_head, n_embd, flash
        mask = torch.tril(torch.ones(block, block)).view(1, 1, block, block)
        self.register_buffer("bias", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(
                q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, n_embd: int, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd, bias=False), nn.LayerNorm(n_embd, bias=False)
        self.attn = CausalSelfAttention(n_embd, 4, 32, flash)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, flash: bool, n_embd: int = 32) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, n_embd),
                "wpe": nn.Embedding(32, n_embd),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(Block(n_embd, flash) for _ in range(2)),
                "ln_f": nn.LayerNorm(n_embd),
            }
        )
        self.lm_head = nn.Linear(n_embd, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def _nanogpt(flash: bool) -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["y"])

    axes = {"x": _BOTH, "y": _BOTH}
    return TrainStep(GPT(flash), loss, {"x": _tokens(), "y": _tokens()}, dynamic=axes)


KIND.add("nanoGPT")(lambda: _nanogpt(True))
KIND.add("nanoGPT, masked by a buffer")(lambda: _nanogpt(False))


class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.convs = nn.ModuleList(nn.Conv2d(1, 16, (k, 32)) for k in (3, 4, 5))
        self.fc1 = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).unsqueeze(1)
        xs = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        xs = [F.max_pool1d(i, i.size(2)).squeeze(2) for i in xs]
        return self.fc1(F.dropout(torch.cat(xs, 1), 0.5, self.training))


def _labelled(model: nn.Module) -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["ids"]), batch["label"])

    return TrainStep(model, loss, {"ids": _tokens(), "label": torch.randint(3, (ROWS,))})


KIND.add("TextCNN")(lambda: _labelled(TextCNN()))


class BiLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 24, padding_idx=0)
        self.rnn = nn.LSTM(24, 24, num_layers=2, bidirectional=True, dropout=0.5)
        self.fc, self.dropout = nn.Linear(48, 3), nn.Dropout(0.5)

    def forward(self, text: Tensor) -> Tensor:
        embedded = self.dropout(self.embedding(text.t()))
        _, (hidden, _) = self.rnn(embedded)
        return self.fc(self.dropout(torch.cat((hidden[-2], hidden[-1]), dim=1)))


KIND.add("BiLSTM classifier")(lambda: _labelled(BiLSTM()))


@KIND.add("fastText with EmbeddingBag")
def fasttext() -> TrainStep:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.EmbeddingBag(WORDS, 32, sparse=False)
            self.fc = nn.Linear(32, 3)

        def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
            return self.fc(self.embedding(text, offsets))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["text"], batch["offsets"]), batch["label"])

    batch = {
        "text": torch.randint(WORDS, (40,)),
        "offsets": torch.tensor([0, 7, 20, 29]),
        "label": torch.randint(3, (ROWS,)),
    }
    axes = {"text": {0: "words"}, "offsets": {0: "batch"}, "label": {0: "batch"}}
    return TrainStep(Model(), loss, batch, "sgd", axes)


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Embedding(WORDS, 24, sparse=False), nn.Embedding(WORDS, 24)
        nn.init.constant_(self.v.weight.data, 0)

    def forward(self, pos_u: Tensor, pos_v: Tensor, neg_v: Tensor) -> Tensor:
        emb_u, emb_v, emb_neg = self.u(pos_u), self.v(pos_v), self.v(neg_v)
        score = torch.clamp(torch.sum(torch.mul(emb_u, emb_v), dim=1), max=10, min=-10)
        score = -F.logsigmoid(score)
        neg = torch.bmm(emb_neg, emb_u.unsqueeze(2)).squeeze()
        neg = -torch.sum(F.logsigmoid(-torch.clamp(neg, max=10, min=-10)), dim=1)
        return torch.mean(score + neg)


@KIND.add("word2vec, skip-gram")
def word2vec() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["u"], batch["v"], batch["neg"])

    batch = {
        "u": torch.randint(WORDS, (32,)),
        "v": torch.randint(WORDS, (32,)),
        "neg": torch.randint(WORDS, (32, 5)),
    }
    return TrainStep(SkipGram(), loss, batch, "plain sgd")


@KIND.add("nn.Transformer translation")
def translation() -> TrainStep:
    class Model(nn.Module):
        def __init__(self, d: int = 32) -> None:
            super().__init__()
            self.transformer = nn.Transformer(d, 4, 2, 2, 64, 0.1)
            self.generator = nn.Linear(d, WORDS)
            self.src, self.tgt = nn.Embedding(WORDS, d), nn.Embedding(WORDS, d)
            position = torch.arange(0, 64).reshape(64, 1)
            den = torch.exp(-torch.arange(0, d, 2) * math.log(10000) / d)
            pos = torch.zeros((64, d))
            pos[:, 0::2] = torch.sin(position * den)
            pos[:, 1::2] = torch.cos(position * den)
            self.register_buffer("pos", pos.unsqueeze(-2))

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            n = tgt.shape[0]
            tgt_mask = (torch.triu(torch.ones((n, n))) == 1).transpose(0, 1)
            tgt_mask = (
                tgt_mask.float()
                .masked_fill(tgt_mask == 0, float("-inf"))
                .masked_fill(tgt_mask == 1, float(0.0))
            )
            src_mask = torch.zeros((src.shape[0], src.shape[0])).type(torch.bool)
            src_pad, tgt_pad = (src == 1).transpose(0, 1), (tgt == 1).transpose(0, 1)
            a = F.dropout(self.src(src) + self.pos[: src.size(0), :], 0.1, self.training)
            b = F.dropout(self.tgt(tgt) + self.pos[: tgt.size(0), :], 0.1, self.training)
            out = self.transformer(a, b, src_mask, tgt_mask, None, src_pad, tgt_pad, src_pad)
            return self.generator(out)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        src, tgt = batch["src"].t(), batch["tgt"].t()
        logits = model(src, tgt[:-1, :])
        out = tgt[1:, :]
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), out.reshape(-1), ignore_index=1
        )

    return TrainStep(Model(), loss, {"src": _tokens(), "tgt": _tokens()})
