"""Models that an accelerator is for: a transformer with LoRA, a ViT, ResNet-50; torch alone."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


class LowRank(nn.Module):
    """A frozen linear layer plus B A x / rank, of which A and B are trained.

    Hu et al. 2021, LoRA: low-rank adaptation of large language models, section 4.1.
    """

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        self._scale = 1.0 / rank

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(x)) * self._scale
        result: Tensor = self.frozen(x) + added
        return result


class Block(nn.Module):
    """A pre-norm transformer block; with a ``rank``, only low-rank additions are trained."""

    def __init__(self, width: int, heads: int, rank: int | None = None) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Module:
            if rank is not None:
                return LowRank(inputs, outputs, rank)
            return nn.Linear(inputs, outputs)

        self._heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.merged = linear(width, 3 * width), linear(width, width)
        self.wide, self.narrow = linear(width, 4 * width), linear(4 * width, width)
        if rank is not None:
            self.before.requires_grad_(False)
            self.between.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mixed(self.before(x)).view(batch, length, 3, self._heads, width // self._heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.merged(seen.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.narrow(functional.gelu(self.wide(self.between(x))))
        return result


class LoraClassifier(nn.Module):
    """[b, length] token ids to [b, classes]: a frozen encoder with LoRA in every linear layer."""

    def __init__(
        self, width: int = 256, depth: int = 4, tokens: int = 8000, length: int = 64, rank: int = 8
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width).requires_grad_(False)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02, requires_grad=False)
        self.blocks = nn.Sequential(
            *(Block(width, max(1, width // 64), rank) for _ in range(depth))
        )
        self.out = nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.blocks(self.tokens(ids) + self.places)
        logits: Tensor = self.out(hidden.mean(1))
        return logits


class VisionTransformer(nn.Module):
    """[b, 3, size, size] to [b, 10] logits; patches are averaged at the end.

    Dosovitskiy et al. 2021, An image is worth 16 x 16 words; width, depth and heads of ViT-Tiny.
    """

    def __init__(self, size: int = 64, patch: int = 8, width: int = 192, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.randn((size // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.patches(x).flatten(2).transpose(1, 2) + self.places)
        logits: Tensor = self.out(self.norm(hidden).mean(1))
        return logits


class Bottleneck(nn.Module):
    """relu(x' + f(x)), f convolutions of 1 x 1, 3 x 3 and 1 x 1, four times as wide at the end."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """[b, 3, h, w] (multiples of 32) to [b, 10] logits.

    He et al. 2016, Deep residual learning for image recognition, table 1, 50 layers; ``width`` is
    64 and ``stages`` (3, 4, 6, 3) there.
    """

    def __init__(self, width: int = 64, stages: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        blocks: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(stages):
            inner = width * 2**stage
            for index in range(count):
                blocks.append(Bottleneck(channels, inner, 2 if stage and not index else 1))
                channels = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.blocks(self.stem(x)).mean((2, 3)))
        return logits
