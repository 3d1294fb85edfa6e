"""Forecasting and classification of time series, as the papers' public code writes them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.export_survey.subject import Batch, Kind, TrainStep

KIND = Kind("time series")

PAST, FUTURE, CHANNELS, ROWS = 48, 12, 5, 8


def forecast(model: nn.Module) -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.MSELoss()(model(batch["x"]), batch["y"])

    batch = {"x": torch.randn(ROWS, PAST, CHANNELS), "y": torch.randn(ROWS, FUTURE, CHANNELS)}
    return TrainStep(model, loss, batch)


class moving_avg(nn.Module):
    def __init__(self, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.avg = nn.AvgPool1d(kernel_size=kernel_size, stride=stride, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        front = x[:, 0:1, :].repeat(1, (self.kernel_size - 1) // 2, 1)
        end = x[:, -1:, :].repeat(1, (self.kernel_size - 1) // 2, 1)
        x = torch.cat([front, x, end], dim=1)
        return self.avg(x.permute(0, 2, 1)).permute(0, 2, 1)


class series_decomp(nn.Module):
    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        self.moving_avg = moving_avg(kernel_size, stride=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.moving_avg(x)
        return x - mean, mean


class RevIN(nn.Module):
    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.affine_weight = nn.Parameter(torch.ones(features))
        self.affine_bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            dims = tuple(range(1, x.ndim - 1))
            self.mean = torch.mean(x, dim=dims, keepdim=True).detach()
            var = torch.var(x, dim=dims, keepdim=True, unbiased=False)
            self.stdev = torch.sqrt(var + self.eps).detach()
            return (x - self.mean) / self.stdev * self.affine_weight + self.affine_bias
        x = (x - self.affine_bias) / (self.affine_weight + self.eps * self.eps)
        return x * self.stdev + self.mean


class DLinear(nn.Module):
    def __init__(self, individual: bool) -> None:
        super().__init__()
        self.decomposition = series_decomp(25)
        self.individual = individual
        if individual:
            self.Linear_Seasonal = nn.ModuleList(nn.Linear(PAST, FUTURE) for _ in range(CHANNELS))
            self.Linear_Trend = nn.ModuleList(nn.Linear(PAST, FUTURE) for _ in range(CHANNELS))
        else:
            self.Linear_Seasonal = nn.Linear(PAST, FUTURE)
            self.Linear_Trend = nn.Linear(PAST, FUTURE)

    def forward(self, x: Tensor) -> Tensor:
        seasonal, trend = self.decomposition(x)
        seasonal, trend = seasonal.permute(0, 2, 1), trend.permute(0, 2, 1)
        if self.individual:
            seasonal_out = torch.zeros([seasonal.size(0), seasonal.size(1), FUTURE], dtype=x.dtype)
            trend_out = torch.zeros([trend.size(0), trend.size(1), FUTURE], dtype=x.dtype)
            for i in range(CHANNELS):
                seasonal_out[:, i, :] = self.Linear_Seasonal[i](seasonal[:, i, :])
                trend_out[:, i, :] = self.Linear_Trend[i](trend[:, i, :])
        else:
            seasonal_out, trend_out = self.Linear_Seasonal(seasonal), self.Linear_Trend(trend)
        return (seasonal_out + trend_out).permute(0, 2, 1)


KIND.add("DLinear")(lambda: forecast(DLinear(False)))


class PatchTST(nn.Module):
    def __init__(self, patch: int = 8, stride: int = 4, d: int = 32) -> None:
        super().__init__()
        self.patch, self.stride = patch, stride
        self.revin = RevIN(CHANNELS)
        self.padding = nn.ReplicationPad1d((0, stride))
        patches = (PAST - patch) // stride + 2
        self.embedding = nn.Linear(patch, d)
        self.position = nn.Parameter(torch.empty(patches, d).uniform_(-0.02, 0.02))
        layer = nn.TransformerEncoderLayer(
            d, 4, 64, dropout=0.2, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.flatten = nn.Flatten(start_dim=-2)
        self.head = nn.Linear(patches * d, FUTURE)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.revin(x, "norm").permute(0, 2, 1)
        z = self.padding(z).unfold(dimension=-1, size=self.patch, step=self.stride)
        u = self.embedding(z)
        u = torch.reshape(u, (u.shape[0] * u.shape[1], u.shape[2], u.shape[3]))
        u = self.encoder(self.dropout(u + self.position))
        u = torch.reshape(u, (-1, CHANNELS, u.shape[-2], u.shape[-1]))
        out = self.dropout(self.head(self.flatten(u))).permute(0, 2, 1)
        return self.revin(out, "denorm")


KIND.add("PatchTST")(lambda: forecast(PatchTST()))


class iTransformer(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Linear(PAST, d)
        self.query, self.key, self.value = (nn.Linear(d, d) for _ in range(3))
        self.conv1, self.conv2 = nn.Conv1d(d, 64, 1), nn.Conv1d(64, d, 1)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.dropout = nn.Dropout(0.1)
        self.projection = nn.Linear(d, FUTURE)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean(1, keepdim=True).detach()
        x = x - means
        stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x /= stdev
        h = self.dropout(self.embedding(x.permute(0, 2, 1)))
        b, n, _ = h.shape
        q, k, v = (f(h).view(b, n, 4, -1) for f in (self.query, self.key, self.value))
        scores = torch.einsum("blhe,bshe->bhls", q, k)
        a = self.dropout(torch.softmax(scores / math.sqrt(q.shape[-1]), dim=-1))
        h = self.norm1(h + torch.einsum("bhls,bshd->blhd", a, v).reshape(b, n, -1))
        y = self.dropout(F.gelu(self.conv1(h.transpose(-1, 1))))
        h = self.norm2(h + self.dropout(self.conv2(y).transpose(-1, 1)))
        out = self.projection(h).permute(0, 2, 1)[:, :, :CHANNELS]
        out = out * stdev[:, 0, :].unsqueeze(1).repeat(1, FUTURE, 1)
        return out + means[:, 0, :].unsqueeze(1).repeat(1, FUTURE, 1)


KIND.add("iTransformer")(lambda: forecast(iTransformer()))


class PositionalEmbedding(nn.Module):
    def __init__(self, d: int, length: int = 500) -> None:
        super().__init__()
        pe = torch.zeros(length, d).float()
        pe.require_grad = False  # type: ignore[attr-defined]
        position = torch.arange(0, length).float().unsqueeze(1)
        div_term = (torch.arange(0, d, 2).float() * -(math.log(10000.0) / d)).exp()
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.pe[:, : x.size(1)]


class DataEmbedding(nn.Module):
    def __init__(self, channels: int, d: int) -> None:
        super().__init__()
        self.tokenConv = nn.Conv1d(
            channels, d, kernel_size=3, padding=1, padding_mode="circular", bias=False
        )
        self.position = PositionalEmbedding(d)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        value = self.tokenConv(x.permute(0, 2, 1)).transpose(1, 2)
        return self.dropout(value + self.position(x))


class AutoCorrelation(nn.Module):
    """Wu et al. 2021, the batch-normalised form that training uses: FFT, top k, rolled sums."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        b, length, _ = queries.shape
        h = self.heads
        q = self.q(queries).view(b, length, h, -1)
        k = self.k(keys).view(b, keys.shape[1], h, -1)
        v = self.v(keys).view(b, keys.shape[1], h, -1)
        if length > k.size(1):
            zeros = torch.zeros_like(q[:, : (length - k.size(1)), :]).float()
            v, k = torch.cat([v, zeros], dim=1), torch.cat([k, zeros], dim=1)
        else:
            v, k = v[:, :length], k[:, :length]
        q_fft = torch.fft.rfft(q.permute(0, 2, 3, 1).contiguous(), dim=-1)
        k_fft = torch.fft.rfft(k.permute(0, 2, 3, 1).contiguous(), dim=-1)
        corr = torch.fft.irfft(q_fft * torch.conj(k_fft), dim=-1)
        values = v.permute(0, 2, 3, 1).contiguous()
        top_k = int(math.log(length))
        mean_value = torch.mean(torch.mean(corr, dim=1), dim=1)
        index = torch.topk(torch.mean(mean_value, dim=0), top_k, dim=-1)[1]
        weights = torch.stack([mean_value[:, index[i]] for i in range(top_k)], dim=-1)
        tmp_corr = torch.softmax(weights, dim=-1)
        delays_agg = torch.zeros_like(values).float()
        doubled = values.repeat(1, 1, 1, 2)
        init = torch.arange(length).unsqueeze(0).unsqueeze(0).unsqueeze(0)
        init = init.repeat(b, values.shape[1], values.shape[2], 1)
        for i in range(top_k):
            pattern = torch.gather(doubled, dim=-1, index=init + index[i])
            weight = tmp_corr[:, i].unsqueeze(1).unsqueeze(1).unsqueeze(1)
            delays_agg = delays_agg + pattern * weight.repeat(
                1, values.shape[1], values.shape[2], length
            )
        return self.out(delays_agg.permute(0, 3, 1, 2).contiguous().view(b, length, -1))


class Autoformer(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.decomp = series_decomp(13)
        self.enc_embedding = DataEmbedding(CHANNELS, d)
        self.dec_embedding = DataEmbedding(CHANNELS, d)
        self.attention, self.self_attention, self.cross = (AutoCorrelation(d, 2) for _ in range(3))
        self.feed = nn.Sequential(nn.Linear(d, 32), nn.GELU(), nn.Linear(32, d))
        self.trend = nn.Conv1d(d, CHANNELS, 3, padding=1, padding_mode="circular", bias=False)
        self.projection = nn.Linear(d, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.mean(x, dim=1).unsqueeze(1).repeat(1, FUTURE, 1)
        zeros = torch.zeros([x.shape[0], FUTURE, x.shape[2]])
        seasonal_init, trend_init = self.decomp(x)
        label = PAST // 2
        trend = torch.cat([trend_init[:, -label:, :], mean], dim=1)
        seasonal = torch.cat([seasonal_init[:, -label:, :], zeros], dim=1)
        e = self.enc_embedding(x)
        e, _ = self.decomp(e + self.attention(e, e))
        e, _ = self.decomp(e + self.feed(e))
        h = self.dec_embedding(seasonal)
        h, t1 = self.decomp(h + self.self_attention(h, h))
        h, t2 = self.decomp(h + self.cross(h, e))
        h, t3 = self.decomp(h + self.feed(h))
        residual = self.trend((t1 + t2 + t3).permute(0, 2, 1)).transpose(1, 2)
        return (trend + residual + self.projection(h))[:, -FUTURE:, :]


KIND.add("Autoformer")(lambda: forecast(Autoformer()))


class ProbAttention(nn.Module):
    """Zhou et al. 2021: sampled keys, the most active queries, in-place updates."""

    def __init__(self, d: int, heads: int, factor: int = 3) -> None:
        super().__init__()
        self.heads, self.factor = heads, factor
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        b, lq, _ = queries.shape
        lk = keys.shape[1]
        q = self.q(queries).view(b, lq, self.heads, -1).transpose(2, 1)
        k = self.k(keys).view(b, lk, self.heads, -1).transpose(2, 1)
        v = self.v(keys).view(b, lk, self.heads, -1).transpose(2, 1)
        sampled = min(self.factor * math.ceil(math.log(lk)), lk)
        top = min(self.factor * math.ceil(math.log(lq)), lq)
        d = q.shape[-1]
        k_expand = k.unsqueeze(-3).expand(b, self.heads, lq, lk, d)
        index_sample = torch.randint(lk, (lq, sampled))
        k_sample = k_expand[:, :, torch.arange(lq).unsqueeze(1), index_sample, :]
        q_k_sample = torch.matmul(q.unsqueeze(-2), k_sample.transpose(-2, -1)).squeeze()
        m = q_k_sample.max(-1)[0] - torch.div(q_k_sample.sum(-1), lk)
        m_top = m.topk(top, sorted=False)[1]
        rows = torch.arange(b)[:, None, None]
        heads = torch.arange(self.heads)[None, :, None]
        q_reduce = q[rows, heads, m_top, :]
        scores = torch.matmul(q_reduce, k.transpose(-2, -1)) * (1.0 / math.sqrt(d))
        context = v.mean(dim=-2).unsqueeze(-2).expand(b, self.heads, lq, d).clone()
        attn = torch.softmax(scores, dim=-1)
        context[rows, heads, m_top, :] = torch.matmul(attn, v).type_as(context)
        return self.out(context.transpose(2, 1).contiguous().view(b, lq, -1))


class Informer(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.enc_embedding, self.dec_embedding = (DataEmbedding(CHANNELS, d) for _ in range(2))
        self.attention, self.second = ProbAttention(d, 2), ProbAttention(d, 2)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.downConv = nn.Conv1d(d, d, kernel_size=3, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm1d(d)
        self.pool = nn.MaxPool1d(kernel_size=3, stride=2, padding=1)
        self.cross = nn.MultiheadAttention(d, 2, batch_first=True, dropout=0.1)
        self.projection = nn.Linear(d, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enc_embedding(x)
        h = self.norms[0](h + self.attention(h, h))
        h = self.pool(F.elu(self.norm(self.downConv(h.permute(0, 2, 1))))).transpose(1, 2)
        h = self.norms[1](h + self.second(h, h))
        zeros = torch.zeros(x.shape[0], FUTURE, x.shape[2])
        y = self.dec_embedding(torch.cat([x[:, -FUTURE:], zeros], dim=1))
        y = self.norms[2](y + self.cross(y, h, h, need_weights=False)[0])
        return self.projection(y)[:, -FUTURE:, :]


KIND.add("Informer")(lambda: forecast(Informer()))


class NHiTSBlock(nn.Module):
    def __init__(self, pool: int, hidden: int = 32) -> None:
        super().__init__()
        self.pool = nn.MaxPool1d(pool, pool, ceil_mode=True)
        self.theta = FUTURE // pool
        self.mlp = nn.Sequential(
            nn.Linear(math.ceil(PAST / pool), hidden), nn.ReLU(), nn.Linear(hidden, hidden),
            nn.ReLU(), nn.Linear(hidden, PAST + self.theta),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        theta = self.mlp(self.pool(x.unsqueeze(1)).squeeze(1))
        backcast, knots = theta[:, :PAST], theta[:, PAST:]
        forecast = F.interpolate(knots[:, None, :], size=FUTURE, mode="linear")[:, 0, :]
        return backcast, forecast


class NHiTS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NHiTSBlock(p) for p in (4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, _, c = x.shape
        residuals = x.permute(0, 2, 1).reshape(b * c, PAST)
        forecast = residuals[:, -1:].repeat(1, FUTURE)
        for block in self.blocks:
            backcast, part = block(residuals)
            residuals = residuals - backcast
            forecast = forecast + part
        return forecast.view(b, c, FUTURE).permute(0, 2, 1)


KIND.add("N-HiTS")(lambda: forecast(NHiTS()))


class Chomp1d(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, before: int, after: int, dilation: int, weight_norm: Callable) -> None:
        super().__init__()
        pad = 2 * dilation
        self.net = nn.Sequential(
            weight_norm(nn.Conv1d(before, after, 3, padding=pad, dilation=dilation)),
            Chomp1d(pad), nn.ReLU(), nn.Dropout(0.2),
            weight_norm(nn.Conv1d(after, after, 3, padding=pad, dilation=dilation)),
            Chomp1d(pad), nn.ReLU(), nn.Dropout(0.2),
        )  # fmt: skip
        self.downsample = nn.Conv1d(before, after, 1) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        res = x if self.downsample is None else self.downsample(x)
        return F.relu(self.net(x) + res)


class TCN(nn.Module):
    def __init__(self, weight_norm: Callable) -> None:
        super().__init__()
        widths = (CHANNELS, 16, 16, 16)
        self.network = nn.Sequential(
            *[
                TemporalBlock(a, b, 2**i, weight_norm)
                for i, (a, b) in enumerate(zip(widths, widths[1:]))
            ]
        )
        self.linear = nn.Linear(16, FUTURE * CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(self.network(x.transpose(1, 2))[:, :, -1])
        return out.view(-1, FUTURE, CHANNELS)


KIND.add("TCN")(lambda: forecast(TCN(lambda layer: layer)))
KIND.add("TCN, weight norm (old)")(lambda: forecast(TCN(nn.utils.weight_norm)))
KIND.add("TCN, weight norm (parametrization)")(
    lambda: forecast(TCN(nn.utils.parametrizations.weight_norm))
)


class Seq2Seq(nn.Module):
    """LSTM encoder and decoder, a cell at a time."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.encoder = nn.LSTM(CHANNELS, hidden, batch_first=True)
        self.cell = nn.LSTMCell(CHANNELS, hidden)
        self.fc = nn.Linear(hidden, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, c) = self.encoder(x)
        h, c, inp = h[0], c[0], x[:, -1]
        outputs = torch.zeros(x.size(0), FUTURE, CHANNELS)
        for t in range(FUTURE):
            h, c = self.cell(inp, (h, c))
            inp = self.fc(h)
            outputs[:, t] = inp
        return outputs


KIND.add("LSTM seq2seq")(lambda: forecast(Seq2Seq()))


class LSTNet(nn.Module):
    """Lai et al. 2018: convolution, GRU, skip GRU and an autoregressive part."""

    def __init__(self, hidden: int = 16, skip: int = 6) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, hidden, kernel_size=(6, CHANNELS))
        self.GRU1, self.GRUskip = nn.GRU(hidden, hidden), nn.GRU(hidden, 5)
        self.skip, self.pt = skip, (PAST - 6) // skip
        self.linear1 = nn.Linear(hidden + skip * 5, CHANNELS)
        self.highway = nn.Linear(12, 1)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        batch_size = x.size(0)
        c = F.relu(self.conv1(x.view(-1, 1, PAST, CHANNELS)))
        c = torch.squeeze(F.dropout(c, 0.2, self.training), 3)
        _, r = self.GRU1(c.permute(2, 0, 1).contiguous())
        r = torch.squeeze(r, 0)
        s = c[:, :, -self.pt * self.skip :].contiguous()
        s = s.view(batch_size, self.hidden, self.pt, self.skip).permute(2, 0, 3, 1).contiguous()
        _, s = self.GRUskip(s.view(self.pt, batch_size * self.skip, self.hidden))
        s = s.view(batch_size, self.skip * 5)
        res = self.linear1(torch.cat((r, s), 1))
        z = x[:, -12:, :].permute(0, 2, 1).contiguous().view(-1, 12)
        return torch.sigmoid(res + self.highway(z).view(-1, CHANNELS))


@KIND.add("LSTNet")
def lstnet() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.l1_loss(model(batch["x"]), batch["y"], reduction="sum")

    batch = {"x": torch.rand(ROWS, PAST, CHANNELS), "y": torch.rand(ROWS, CHANNELS)}
    return TrainStep(LSTNet(), loss, batch)


class TransformerForecaster(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.inp, self.position = nn.Linear(CHANNELS, d), PositionalEmbedding(d)
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(d, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        h = self.inp(x)
        h = self.encoder(h + self.position(h), mask=mask)
        return self.out(h)[:, -FUTURE:]


KIND.add("causal nn.TransformerEncoder")(lambda: forecast(TransformerForecaster()))


@KIND.add("PatchTST (transformers)", "transformers")
def hf_patchtst() -> TrainStep:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    model = PatchTSTForPrediction(
        PatchTSTConfig(
            num_input_channels=CHANNELS, context_length=PAST, patch_length=8, patch_stride=8,
            d_model=32, num_attention_heads=4, num_hidden_layers=2, ffn_dim=64,
            prediction_length=FUTURE, loss="mse",
        )
    )  # fmt: skip

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(past_values=batch["x"], future_values=batch["y"]).loss

    return TrainStep(model, loss, forecast(nn.Identity()).batch)


@KIND.add("PatchTSMixer (transformers)", "transformers")
def hf_patchtsmixer() -> TrainStep:
    from transformers import PatchTSMixerConfig, PatchTSMixerForPrediction

    model = PatchTSMixerForPrediction(
        PatchTSMixerConfig(
            num_input_channels=CHANNELS, context_length=PAST, patch_length=8, patch_stride=8,
            d_model=16, num_layers=2, prediction_length=FUTURE,
        )
    )  # fmt: skip

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(past_values=batch["x"], future_values=batch["y"]).loss

    return TrainStep(model, loss, forecast(nn.Identity()).batch)
