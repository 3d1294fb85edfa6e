"""Keyword spotting, raw waveforms, separation, speech."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.export_survey.subject import Batch, Kind, TrainStep

KIND = Kind("audio")

ROWS, CLASSES = 4, 8


def _classified(model: nn.Module, *shape: int) -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["audio"]), batch["label"])

    batch = {"audio": torch.randn(ROWS, *shape), "label": torch.randint(CLASSES, (ROWS,))}
    return TrainStep(model, loss, batch)


class BCResBlock(nn.Module):
    """Kim et al. 2021: broadcast residual learning with sub-spectral norm."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.f2 = nn.Conv2d(channels, channels, (3, 1), padding=(1, 0), groups=channels, bias=False)
        self.ssn = nn.BatchNorm2d(channels * 5)
        self.f1 = nn.Sequential(
            nn.Conv2d(
                channels, channels, (1, 3), padding=(0, dilation), dilation=(1, dilation),
                groups=channels, bias=False,
            ),
            nn.BatchNorm2d(channels), nn.SiLU(),
            nn.Conv2d(channels, channels, 1, bias=False), nn.Dropout2d(0.1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        n, c, f, t = x.size()
        aux = self.ssn(self.f2(x).view(n, c * 5, f // 5, t)).view(n, c, f, t)
        out = self.f1(torch.mean(aux, 2, keepdim=True))
        return F.relu(x + aux + out.expand(n, c, f, t))


@KIND.add("BC-ResNet")
def bcresnet() -> TrainStep:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=(2, 1), padding=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        BCResBlock(16, 1), BCResBlock(16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, CLASSES),
    )  # fmt: skip
    return _classified(model, 1, 40, 50)


class GlobalLayerNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, size, 1))
        self.beta = nn.Parameter(torch.zeros(1, size, 1))

    def forward(self, y: Tensor) -> Tensor:
        mean = y.mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        var = torch.pow(y - mean, 2).mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        return self.gamma * (y - mean) / torch.pow(var + 1e-8, 0.5) + self.beta


class ConvTasNet(nn.Module):
    """Luo and Mesgarani 2019, small."""

    def __init__(self, n: int = 16, length: int = 8, speakers: int = 2) -> None:
        super().__init__()
        self.speakers, self.n = speakers, n
        self.encoder = nn.Conv1d(1, n, length, stride=length // 2, bias=False)
        self.bottleneck = nn.Sequential(GlobalLayerNorm(n), nn.Conv1d(n, n, 1))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(n, 2 * n, 1), nn.PReLU(), GlobalLayerNorm(2 * n),
                nn.Conv1d(2 * n, 2 * n, 3, padding=d, dilation=d, groups=2 * n),
                nn.PReLU(), GlobalLayerNorm(2 * n), nn.Conv1d(2 * n, n, 1),
            )
            for d in (1, 2, 4)
        )  # fmt: skip
        self.mask = nn.Conv1d(n, speakers * n, 1)
        self.decoder = nn.ConvTranspose1d(n, 1, length, stride=length // 2, bias=False)

    def forward(self, mixture: Tensor) -> Tensor:
        w = F.relu(self.encoder(mixture.unsqueeze(1)))
        h = self.bottleneck(w)
        for block in self.blocks:
            h = h + block(h)
        m, _, k = w.size()
        masks = F.relu(self.mask(h)).view(m, self.speakers, self.n, k)
        sources = torch.unsqueeze(w, 1) * masks
        out = self.decoder(sources.view(m * self.speakers, self.n, k))
        return out.view(m, self.speakers, -1)


def si_snr(estimate: Tensor, source: Tensor) -> Tensor:
    estimate = estimate - estimate.mean(-1, keepdim=True)
    source = source - source.mean(-1, keepdim=True)
    dot = (estimate * source).sum(-1, keepdim=True)
    projection = dot * source / (source.pow(2).sum(-1, keepdim=True) + 1e-8)
    noise = estimate - projection
    ratio = projection.pow(2).sum(-1) / (noise.pow(2).sum(-1) + 1e-8)
    return 10 * torch.log10(ratio + 1e-8)


@KIND.add("Conv-TasNet, permutation invariant")
def convtasnet() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        estimate = model(batch["mixture"])
        pairs = si_snr(estimate.unsqueeze(1), batch["sources"].unsqueeze(2))
        both = torch.stack(
            [(pairs[:, 0, 0] + pairs[:, 1, 1]) / 2, (pairs[:, 0, 1] + pairs[:, 1, 0]) / 2], 1
        )
        return -both.max(1)[0].mean()

    sources = torch.randn(ROWS, 2, 400)
    return TrainStep(ConvTasNet(), loss, {"mixture": sources.sum(1), "sources": sources})


class Speech(nn.Module):
    """DeepSpeech-like: convolutions, a bidirectional GRU and CTC."""

    def __init__(self, labels: int = 12, hidden: int = 24) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, (11, 5), stride=(2, 2), padding=(5, 2)), nn.BatchNorm2d(8),
            nn.Hardtanh(0, 20, inplace=True),
        )  # fmt: skip
        self.rnn = nn.GRU(8 * 10, hidden, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(2 * hidden, labels)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.unsqueeze(1))
        b, c, f, t = h.size()
        h = h.view(b, c * f, t).transpose(1, 2)
        h, _ = self.rnn(h)
        return F.log_softmax(self.fc(h), dim=-1).transpose(0, 1)


@KIND.add("CTC speech")
def ctc() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        log_probs = model(batch["spectrum"])
        lengths = torch.full((log_probs.size(1),), log_probs.size(0), dtype=torch.long)
        return F.ctc_loss(
            log_probs, batch["target"], lengths, batch["target_length"], zero_infinity=True
        )

    batch = {
        "spectrum": torch.randn(ROWS, 20, 40),
        "target": torch.randint(1, 12, (ROWS, 6)),
        "target_length": torch.randint(2, 7, (ROWS,)),
    }
    return TrainStep(Speech(), loss, batch)


class Spectrogram(nn.Module):
    """STFT inside the model, as torchaudio's transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(16, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        spec = torch.stft(x, 64, 32, 64, window=self.window, center=True, return_complex=True)
        return self.conv((spec.abs().pow(2) + 1e-6).log().unsqueeze(1))


KIND.add("STFT and a CNN")(lambda: _classified(Spectrogram(), 800))


class SincConv(nn.Module):
    """Ravanelli and Bengio 2018: band-pass filters by their cut-off frequencies."""

    def __init__(self, out: int = 8, kernel: int = 65, rate: int = 8000) -> None:
        super().__init__()
        low = torch.linspace(30, rate / 2 - 100, out + 1)
        self.low_hz_ = nn.Parameter(low[:-1].view(-1, 1))
        self.band_hz_ = nn.Parameter(torch.diff(low).view(-1, 1))
        n = (kernel - 1) / 2.0
        self.register_buffer("n_", 2 * math.pi * torch.arange(-n, 0).view(1, -1) / rate)
        n_lin = torch.linspace(0, (kernel / 2) - 1, steps=int(kernel / 2))
        self.register_buffer("window_", 0.54 - 0.46 * torch.cos(2 * math.pi * n_lin / kernel))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        low = 50 + torch.abs(self.low_hz_)
        high = torch.clamp(low + 50 + torch.abs(self.band_hz_), 50, self.rate / 2)
        band = (high - low)[:, 0]
        f_low, f_high = torch.matmul(low, self.n_), torch.matmul(high, self.n_)
        left = ((torch.sin(f_high) - torch.sin(f_low)) / (self.n_ / 2)) * self.window_
        center = 2 * band.view(-1, 1)
        filters = torch.cat([left, center, torch.flip(left, dims=[1])], dim=1)
        filters = filters / (2 * band[:, None])
        return F.conv1d(x, filters.view(filters.size(0), 1, -1))


@KIND.add("SincNet")
def sincnet() -> TrainStep:
    model = nn.Sequential(
        SincConv(), nn.MaxPool1d(3), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Conv1d(8, 16, 5),
        nn.MaxPool1d(3), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.AdaptiveAvgPool1d(1),
        nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip
    return _classified(model, 1, 800)


def _wav2vec(own_loss: bool) -> TrainStep:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    model = Wav2Vec2ForCTC(
        Wav2Vec2Config(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, vocab_size=12,
            layerdrop=0.0, apply_spec_augment=False, ctc_loss_reduction="mean",
        )
    )  # fmt: skip

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        labels = batch["labels"]
        if own_loss:
            return model(input_values=batch["audio"], labels=labels).loss
        log_probs = model(batch["audio"]).logits.log_softmax(-1).transpose(0, 1)
        frames = torch.full((labels.shape[0],), log_probs.shape[0])
        return F.ctc_loss(log_probs, labels, frames, torch.full_like(frames, labels.shape[1]))

    batch = {"audio": torch.randn(2, 800), "labels": torch.randint(1, 12, (2, 6))}
    return TrainStep(model, loss, batch)


# The package's forward raises where a label is too large, which reads the labels.
KIND.add("wav2vec 2.0 with CTC, the package's loss", "transformers")(lambda: _wav2vec(True))
KIND.add("wav2vec 2.0 with CTC", "transformers")(lambda: _wav2vec(False))


@KIND.add("wav2vec 2.0 classifier (transformers)", "transformers")
def wav2vec_classifier() -> TrainStep:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    model = Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, layerdrop=0.0,
            apply_spec_augment=False, classifier_proj_size=16, num_labels=CLASSES,
        )
    )  # fmt: skip

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["audio"]).logits, batch["label"])

    return TrainStep(model, loss, _classified(nn.Identity(), 800).batch)


@KIND.add("AST (transformers)", "transformers")
def spectrogram_transformer() -> TrainStep:
    from transformers import ASTConfig, ASTForAudioClassification

    model = ASTForAudioClassification(
        ASTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            num_mel_bins=32, max_length=64, num_labels=CLASSES,
        )
    )  # fmt: skip

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(input_values=batch["audio"], labels=batch["label"]).loss

    return TrainStep(model, loss, _classified(nn.Identity(), 64, 32).batch)


@KIND.add("Whisper (transformers)", "transformers")
def whisper() -> TrainStep:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=60, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
            decoder_ffn_dim=64, max_source_positions=40, max_target_positions=20, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(input_features=batch["mel"], labels=batch["labels"]).loss

    batch = {"mel": torch.randn(2, 16, 80), "labels": torch.randint(3, 60, (2, 8))}
    return TrainStep(model, loss, batch)
