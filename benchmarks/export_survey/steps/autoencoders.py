"""Autoencoders, and other generative models that one step trains."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.export_survey.subject import Batch, Kind, TrainStep

KIND = Kind("autoencoders")

ROWS = 16


def _pictures(*shape: int) -> Batch:
    return {"x": torch.rand(ROWS, *shape)}


class ConvVAE(nn.Module):
    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU(),
            nn.Conv2d(16, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(),
        )  # fmt: skip
        self.fc_mu, self.fc_var = nn.Linear(32 * 64, latent), nn.Linear(32 * 64, latent)
        self.decoder_input = nn.Linear(latent, 32 * 64)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 3, 2, 1, output_padding=1), nn.BatchNorm2d(16),
            nn.LeakyReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(16, 3, 3, padding=1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.flatten(self.encoder(x), start_dim=1)
        mu, log_var = self.fc_mu(h), self.fc_var(h)
        z = torch.randn_like(mu) * torch.exp(0.5 * log_var) + mu
        return self.decoder(self.decoder_input(z).view(-1, 32, 8, 8)), mu, log_var


@KIND.add("beta-VAE, convolutional")
def conv_vae() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        recon, mu, log_var = model(batch["x"])
        rec = F.mse_loss(recon, batch["x"])
        kld = torch.mean(-0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1), dim=0)
        return rec + 4 * 0.00025 * kld, {"reconstruction": rec.detach(), "kld": kld.detach()}

    return TrainStep(ConvVAE(), loss, _pictures(3, 32, 32))


class VectorQuantizer(nn.Module):
    def __init__(self, k: int = 32, d: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(k, d)
        self.embedding.weight.data.uniform_(-1 / k, 1 / k)
        self.k, self.d = k, d

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        latents = latents.permute(0, 2, 3, 1).contiguous()
        flat = latents.view(-1, self.d)
        dist = (
            torch.sum(flat**2, dim=1, keepdim=True)
            + torch.sum(self.embedding.weight**2, dim=1)
            - 2 * torch.matmul(flat, self.embedding.weight.t())
        )
        inds = torch.argmin(dist, dim=1).unsqueeze(1)
        one_hot = torch.zeros(inds.size(0), self.k)
        one_hot.scatter_(1, inds, 1)
        quantized = torch.matmul(one_hot, self.embedding.weight).view(latents.shape)
        commitment = F.mse_loss(quantized.detach(), latents)
        loss = commitment * 0.25 + F.mse_loss(quantized, latents.detach())
        quantized = latents + (quantized - latents).detach()
        return quantized.permute(0, 3, 1, 2).contiguous(), loss


class VQVAE(nn.Module):
    def __init__(self, vq: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(), nn.Conv2d(16, 16, 4, 2, 1)
        )
        self.vq = vq
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.LeakyReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quantized, loss = self.vq(self.encoder(x))
        return self.decoder(quantized), loss


def _vqvae(vq: nn.Module) -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        recon, vq_loss = model(batch["x"])
        return F.mse_loss(recon, batch["x"]) + vq_loss

    return TrainStep(VQVAE(vq), loss, _pictures(3, 32, 32))


KIND.add("VQ-VAE")(lambda: _vqvae(VectorQuantizer()))


class QuantizerEMA(nn.Module):
    """The codebook as running means, without a gradient."""

    def __init__(self, k: int = 32, d: int = 16, decay: float = 0.99) -> None:
        super().__init__()
        self.k, self.d, self.decay = k, d, decay
        embed = torch.randn(d, k)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(k))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        x = latents.permute(0, 2, 3, 1)
        flatten = x.reshape(-1, self.d)
        dist = (
            flatten.pow(2).sum(1, keepdim=True)
            - 2 * flatten @ self.embed
            + self.embed.pow(2).sum(0, keepdim=True)
        )
        _, embed_ind = (-dist).max(1)
        onehot = F.one_hot(embed_ind, self.k).type(flatten.dtype)
        quantize = F.embedding(embed_ind.view(*x.shape[:-1]), self.embed.transpose(0, 1))
        if self.training:
            self.cluster_size.data.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
            embed_sum = flatten.transpose(0, 1) @ onehot
            self.embed_avg.data.mul_(self.decay).add_(embed_sum.detach(), alpha=1 - self.decay)
            n = self.cluster_size.sum()
            size = (self.cluster_size + 1e-5) / (n + self.k * 1e-5) * n
            self.embed.data.copy_(self.embed_avg / size.unsqueeze(0))
        diff = (quantize.detach() - x).pow(2).mean()
        quantize = x + (quantize - x).detach()
        return quantize.permute(0, 3, 1, 2), diff


KIND.add("VQ-VAE with a running codebook")(lambda: _vqvae(QuantizerEMA()))


class MaskedAutoencoder(nn.Module):
    """He et al. 2022: random shuffling by argsort of noise."""

    def __init__(self, d: int = 32, patch: int = 4, size: int = 16) -> None:
        super().__init__()
        self.patch = patch
        n = (size // patch) ** 2
        self.embed = nn.Conv2d(3, d, patch, patch)
        self.pos = nn.Parameter(torch.zeros(1, n, d), requires_grad=False)
        self.decoder_pos = nn.Parameter(torch.randn(1, n, d) * 0.02, requires_grad=False)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, d))
        layer = nn.TransformerEncoderLayer(d, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(d, patch * patch * 3)

    def random_masking(self, x: Tensor, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
        n, length, d = x.shape
        keep = int(length * (1 - ratio))
        noise = torch.rand(n, length, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :keep]
        x_masked = torch.gather(x, dim=1, index=ids_keep.unsqueeze(-1).repeat(1, 1, d))
        mask = torch.ones([n, length], device=x.device)
        mask[:, :keep] = 0
        return x_masked, torch.gather(mask, dim=1, index=ids_restore), ids_restore

    def forward(self, imgs: Tensor) -> Tensor:
        x = self.embed(imgs).flatten(2).transpose(1, 2) + self.pos
        x, mask, ids_restore = self.random_masking(x, 0.75)
        x = self.encoder(x)
        tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] - x.shape[1], 1)
        x_ = torch.cat([x, tokens], dim=1)
        x = torch.gather(x_, dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        pred = self.head(self.decoder(x + self.decoder_pos))
        p = self.patch
        h = imgs.shape[2] // p
        target = imgs.reshape(shape=(imgs.shape[0], 3, h, p, h, p))
        target = torch.einsum("nchpwq->nhwpqc", target).reshape(imgs.shape[0], h * h, p**2 * 3)
        mean, var = target.mean(-1, keepdim=True), target.var(-1, keepdim=True)
        target = (target - mean) / (var + 1.0e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(dim=-1)
        return (loss * mask).sum() / mask.sum()


@KIND.add("masked autoencoder")
def masked_autoencoder() -> TrainStep:
    return TrainStep(MaskedAutoencoder(), lambda m, b: m(b["x"]), _pictures(3, 16, 16))


@KIND.add("denoising autoencoder")
def denoising() -> TrainStep:
    model = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 32), nn.ReLU(),
        nn.Linear(32, 64),
    )  # fmt: skip

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        noisy = batch["x"] + 0.1 * torch.randn(batch["x"].shape)
        return F.mse_loss(model(noisy), batch["x"])

    return TrainStep(model, loss, _pictures(64))


class Diffusion(nn.Module):
    """Ho et al. 2020: a step of the noise's prediction, with a table of the schedule."""

    def __init__(self, steps: int = 50) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 0.02, steps)
        self.register_buffer("alphas_bar", torch.cumprod(1.0 - betas, dim=0))
        self.steps = steps
        self.time = nn.Embedding(steps, 16)
        self.down = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.up = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x_0: Tensor) -> Tensor:
        t = torch.randint(self.steps, size=(x_0.shape[0],), device=x_0.device)
        noise = torch.randn_like(x_0)
        bar = self.alphas_bar.gather(0, t).view(-1, 1, 1, 1)
        x_t = bar.sqrt() * x_0 + (1 - bar).sqrt() * noise
        h = self.down(x_t) + self.time(t)[:, :, None, None]
        return F.mse_loss(self.up(F.silu(self.norm(h))), noise)


@KIND.add("DDPM")
def ddpm() -> TrainStep:
    return TrainStep(Diffusion(), lambda m, b: m(b["x"]), _pictures(1, 16, 16))


class RealNVP(nn.Module):
    """Dinh et al. 2017 on vectors: coupling layers with a mask and the prior's log-density."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        masks = torch.stack([(torch.arange(d) % 2 == i % 2).float() for i in range(4)])
        self.mask = nn.Parameter(masks, requires_grad=False)
        self.s = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 32), nn.LeakyReLU(), nn.Linear(32, d), nn.Tanh())
            for _ in range(4)
        )
        self.t = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 32), nn.LeakyReLU(), nn.Linear(32, d)) for _ in range(4)
        )
        self.d = d

    def log_prob(self, x: Tensor) -> Tensor:
        log_det, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(len(self.t))):
            z_ = self.mask[i] * z
            s = self.s[i](z_) * (1 - self.mask[i])
            t = self.t[i](z_) * (1 - self.mask[i])
            z = (1 - self.mask[i]) * (z - t) * torch.exp(-s) + z_
            log_det -= s.sum(dim=1)
        prior = torch.distributions.MultivariateNormal(torch.zeros(self.d), torch.eye(self.d))
        return prior.log_prob(z) + log_det


@KIND.add("RealNVP")
def realnvp() -> TrainStep:
    return TrainStep(RealNVP(), lambda m, b: -m.log_prob(b["x"]).mean(), _pictures(8))
