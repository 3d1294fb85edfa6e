"""Set-ups: how training is arranged around a model."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.export_survey.subject import Batch, Kind, TrainStep

KIND = Kind("set-ups")

ROWS, CLASSES, FEATURES = 8, 5, 20


def _cnn(width: int = 16, out: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, out),
    )  # fmt: skip


def _mlp(before: int = FEATURES, after: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(before, 64), nn.ReLU(), nn.Linear(64, after))


def _pictures() -> Batch:
    return {"x": torch.randn(ROWS, 3, 16, 16), "y": torch.randint(CLASSES, (ROWS,))}


def _rows() -> Batch:
    return {"x": torch.randn(ROWS, FEATURES), "y": torch.randint(CLASSES, (ROWS,))}


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


# Adapters.


@KIND.add("LoRA on GPT-2 (peft)", "peft")
def lora_gpt2() -> TrainStep:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    )
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.05, task_type="CAUSAL_LM", fan_in_fan_out=True
    )
    model = get_peft_model(base, config)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(input_ids=batch["ids"], labels=batch["ids"]).loss

    return TrainStep(model, loss, {"ids": torch.randint(3, 200, (4, 16))})


def _on_bert(config: Any) -> TrainStep:
    from peft import get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    base = BertForSequenceClassification(
        BertConfig(
            vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=64, num_labels=3,
        )
    )  # fmt: skip
    model = get_peft_model(base, config)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(input_ids=batch["ids"], attention_mask=batch["mask"], labels=batch["y"]).loss

    ids = torch.randint(3, 200, (4, 16))
    return TrainStep(
        model, loss, {"ids": ids, "mask": torch.ones_like(ids), "y": torch.randint(3, (4,))}
    )


@KIND.add("LoRA on BERT (peft)", "peft")
def lora_bert() -> TrainStep:
    from peft import LoraConfig

    return _on_bert(
        LoraConfig(r=4, task_type="SEQ_CLS", target_modules=["query", "value"], lora_dropout=0.1)
    )


@KIND.add("IA3 on BERT (peft)", "peft")
def ia3() -> TrainStep:
    from peft import IA3Config

    return _on_bert(
        IA3Config(
            task_type="SEQ_CLS", target_modules=["key", "value", "output.dense"],
            feedforward_modules=["output.dense"],
        )
    )  # fmt: skip


@KIND.add("prompt tuning of BERT (peft)", "peft")
def prompt_tuning() -> TrainStep:
    from peft import PromptTuningConfig

    return _on_bert(PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4))


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 4) -> None:
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling, self.dropout = 2.0, nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (self.dropout(x) @ self.lora_A.T @ self.lora_B.T) * self.scaling


@KIND.add("LoRA by hand")
def lora() -> TrainStep:
    model = nn.Sequential(
        LoRALinear(nn.Linear(FEATURES, 64)), nn.ReLU(), LoRALinear(nn.Linear(64, CLASSES))
    )
    return TrainStep(model, _classify, _rows())


# Frozen parts.


@KIND.add("frozen ResNet-18, new head", "torchvision")
def frozen() -> TrainStep:
    import torchvision

    model = torchvision.models.resnet18(weights=None)
    for p in model.parameters():
        p.requires_grad = False
    model.fc = nn.Linear(512, CLASSES)
    batch = {"x": torch.randn(4, 3, 64, 64), "y": torch.randint(CLASSES, (4,))}
    return TrainStep(model, _classify, batch)


class FrozenBackbone(nn.Module):
    """In evaluation mode for good."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _cnn()[:-1].requires_grad_(False)
        self.head = nn.Linear(32, CLASSES)

    def train(self, mode: bool = True) -> FrozenBackbone:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.backbone(x)
        return self.head(h)


@KIND.add("frozen backbone in evaluation mode")
def frozen_eval() -> TrainStep:
    return TrainStep(FrozenBackbone(), _classify, _pictures())


class TeacherStudent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = _cnn(32), _cnn(8)
        self.teacher.requires_grad_(False)


@KIND.add("distillation")
def distillation() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        model.teacher.eval()
        with torch.no_grad():
            t = model.teacher(batch["x"])
        s = model.student(batch["x"])
        soft = F.kl_div(F.log_softmax(s / 4, 1), F.softmax(t / 4, 1), reduction="batchmean") * 16
        return 0.7 * soft + 0.3 * F.cross_entropy(s, batch["y"])

    return TrainStep(TeacherStudent(), loss, _pictures())


class MeanTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = _mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


@KIND.add("mean teacher, moved in the step")
def mean_teacher() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            for t, s in zip(model.teacher.parameters(), model.student.parameters()):
                t.mul_(0.99).add_(s.detach(), alpha=0.01)
            target = model.teacher(batch["x"]).softmax(1)
        out = model.student(batch["x"] + 0.1 * torch.randn_like(batch["x"]))
        return F.cross_entropy(out, batch["y"]) + F.mse_loss(out.softmax(1), target)

    return TrainStep(
        MeanTeacher(), loss, _rows(), predict=lambda m, b: {"logits": m.student(b["x"])}
    )


class BYOL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(
            nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)
        )
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False
        self.predictor = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)
        )


@KIND.add("BYOL")
def byol() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        p1, p2 = (model.predictor(model.online(batch[k])) for k in ("a", "b"))
        with torch.no_grad():
            z1, z2 = (model.target(batch[k]).detach() for k in ("a", "b"))
        similar = F.cosine_similarity(p1, z2) + F.cosine_similarity(p2, z1)
        return (4 - 2 * similar).mean()

    return TrainStep(BYOL(), loss, {k: torch.randn(ROWS, FEATURES) for k in ("a", "b")})


# Metric learning and contrast.


@KIND.add("triplet margin")
def triplet() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        a, p, n = (F.normalize(model(batch[k])) for k in ("anchor", "positive", "negative"))
        return nn.TripletMarginLoss(margin=0.5)(a, p, n)

    batch = {k: torch.randn(ROWS, FEATURES) for k in ("anchor", "positive", "negative")}
    return TrainStep(_mlp(after=16), loss, batch)


@KIND.add("siamese, contrastive")
def siamese() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        d = F.pairwise_distance(model(batch["a"]), model(batch["b"]), keepdim=True)
        y = batch["y"]
        return torch.mean((1 - y) * d.pow(2) + y * torch.clamp(2.0 - d, min=0.0).pow(2))

    batch = {k: torch.randn(ROWS, FEATURES) for k in ("a", "b")}
    return TrainStep(_mlp(after=16), loss, {**batch, "y": torch.randint(2, (ROWS, 1)).float()})


@KIND.add("SimCLR")
def simclr() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        n = batch["a"].size(0)
        z = F.normalize(model(torch.cat([batch["a"], batch["b"]], dim=0)), dim=1)
        similarity = torch.matmul(z, z.T) / 0.5
        mask = torch.eye(2 * n, dtype=torch.bool, device=z.device)
        similarity = similarity.masked_fill(mask, -9e15)
        pos = mask.roll(shifts=n, dims=0)
        nll = -similarity[pos] + torch.logsumexp(similarity, dim=-1)
        return nll.mean()

    return TrainStep(
        _cnn(out=16), loss, {k: torch.randn(ROWS, 3, 16, 16) for k in ("a", "b")}, dynamic={}
    )


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = _cnn(out=16), nn.EmbeddingBag(100, 16)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))


@KIND.add("CLIP")
def clip() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        i = model.image(batch["x"])
        t = model.text(batch["ids"])
        i, t = i / i.norm(dim=-1, keepdim=True), t / t.norm(dim=-1, keepdim=True)
        logits = model.logit_scale.exp() * i @ t.t()
        labels = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2

    batch = {"x": torch.randn(ROWS, 3, 16, 16), "ids": torch.randint(100, (ROWS, 6))}
    return TrainStep(CLIP(), loss, batch)


@KIND.add("supervised contrastive")
def supcon() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = F.normalize(model(batch["x"]), dim=1)
        labels = batch["y"].contiguous().view(-1, 1)
        mask = torch.eq(labels, labels.T).float()
        anchor_dot = torch.div(torch.matmul(z, z.T), 0.1)
        logits_max, _ = torch.max(anchor_dot, dim=1, keepdim=True)
        logits = anchor_dot - logits_max.detach()
        n = z.size(0)
        logits_mask = torch.scatter(torch.ones_like(mask), 1, torch.arange(n).view(-1, 1), 0)
        mask = mask * logits_mask
        exp_logits = torch.exp(logits) * logits_mask
        log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))
        pairs = mask.sum(1)
        pairs = torch.where(pairs < 1e-6, 1, pairs)
        return -((mask * log_prob).sum(1) / pairs).mean()

    return TrainStep(_mlp(after=16), loss, _rows())


# Mixtures, several tasks, several losses.


class Experts(nn.Module):
    """A dense mixture with the top k of its gates and their balance."""

    def __init__(self, experts: int = 4, k: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList(_mlp() for _ in range(experts))
        self.gate = nn.Linear(FEATURES, experts)
        self.k = k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        top, indices = logits.topk(self.k, dim=1)
        zeros = torch.full_like(logits, float("-inf"))
        gates = torch.softmax(zeros.scatter(1, indices, top), dim=1)
        out = torch.stack([expert(x) for expert in self.experts], dim=1)
        importance = gates.sum(0)
        balance = importance.var() / (importance.mean() ** 2 + 1e-10)
        return (gates.unsqueeze(-1) * out).sum(1), balance


@KIND.add("mixture of experts")
def moe() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out, balance = model(batch["x"])
        return F.cross_entropy(out, batch["y"]) + 0.01 * balance

    return TrainStep(Experts(), loss, _rows())


class UncertaintyWeighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU())
        self.classes, self.value = nn.Linear(32, CLASSES), nn.Linear(32, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))


@KIND.add("multi-task, weighted by uncertainty")
def multitask() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        h = model.body(batch["x"])
        losses = [
            F.cross_entropy(model.classes(h), batch["y"]),
            F.smooth_l1_loss(model.value(h).squeeze(-1), batch["v"]),
        ]
        total = sum(
            torch.exp(-model.log_vars[i]) * one + model.log_vars[i] for i, one in enumerate(losses)
        )
        return total, {"classes": losses[0].detach(), "value": losses[1].detach()}

    return TrainStep(UncertaintyWeighted(), loss, {**_rows(), "v": torch.randn(ROWS)})


@KIND.add("mixup in the step")
def mixup() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch["x"], batch["y"]
        index = torch.randperm(x.size(0))
        lam = batch["lam"]
        mixed = lam * x + (1 - lam) * x[index, :]
        out = model(mixed)
        return lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[index])

    return TrainStep(_cnn(), loss, {**_pictures(), "lam": torch.tensor(0.3)})


@KIND.add("mixup, the order in the batch")
def mixup_given() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y, lam = batch["x"], batch["y"], batch["lam"].view(-1, 1, 1, 1)
        out = model(lam * x + (1 - lam) * x.flip(0))
        one = F.cross_entropy(out, y, reduction="none", label_smoothing=0.1)
        two = F.cross_entropy(out, y.flip(0), reduction="none", label_smoothing=0.1)
        return (batch["lam"] * one + (1 - batch["lam"]) * two).mean()

    return TrainStep(_cnn(), loss, {**_pictures(), "lam": torch.rand(ROWS)})


# Adversaries.


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.LeakyReLU(0.2),
            nn.Linear(32, FEATURES),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(FEATURES, 32), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(32, 1)
        )


@KIND.add("GAN, the discriminator's step")
def gan_discriminator() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = torch.randn(batch["x"].size(0), 8)
        fake = model.generator(z).detach()
        real_out, fake_out = model.discriminator(batch["x"]), model.discriminator(fake)
        bce = nn.BCEWithLogitsLoss()
        return bce(real_out, torch.ones_like(real_out)) + bce(fake_out, torch.zeros_like(fake_out))

    model = GAN()
    model.generator.requires_grad_(False)
    return TrainStep(model, loss, {"x": torch.randn(ROWS, FEATURES)})


@KIND.add("GAN, the generator's step")
def gan_generator() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model.discriminator(model.generator(batch["z"]))
        return F.binary_cross_entropy_with_logits(out, torch.ones_like(out))

    model = GAN()
    model.discriminator.requires_grad_(False)
    return TrainStep(model, loss, {"z": torch.randn(ROWS, 8)})


@KIND.add("WGAN-GP, the critic's step")
def wgan_gp() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        real, fake = batch["real"], batch["fake"]
        alpha = torch.rand(real.size(0), 1)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        out = model(mixed)
        grads = torch.autograd.grad(
            out, mixed, torch.ones_like(out), create_graph=True, retain_graph=True
        )[0]
        penalty = ((grads.norm(2, dim=1) - 1) ** 2).mean()
        return model(fake).mean() - model(real).mean() + 10 * penalty

    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    batch = {k: torch.randn(ROWS, FEATURES) for k in ("real", "fake")}
    return TrainStep(model, loss, batch, predict=lambda m, b: {"score": m(b["real"])})


@KIND.add("FGSM adversarial training")
def fgsm() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"].clone().detach().requires_grad_(True)
        grad = torch.autograd.grad(F.cross_entropy(model(x), batch["y"]), x)[0]
        moved = (x + 0.05 * grad.sign()).detach()
        return F.cross_entropy(model(moved), batch["y"])

    return TrainStep(_mlp(), loss, _rows(), predict=lambda m, b: {"logits": m(b["x"])})


class GradientReversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output.neg() * ctx.alpha, None


@KIND.add("domain adversarial, reversed gradient")
def dann() -> TrainStep:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU())
            self.label, self.domain = nn.Linear(32, CLASSES), nn.Linear(32, 2)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        h = model.body(batch["x"])
        domain = model.domain(GradientReversal.apply(h, 0.5))
        return F.cross_entropy(model.label(h), batch["y"]) + F.cross_entropy(domain, batch["d"])

    return TrainStep(Model(), loss, {**_rows(), "d": torch.randint(2, (ROWS,))})


# How the arithmetic is arranged.


@KIND.add("autocast to bfloat16")
def autocast() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch["x"]), batch["y"])

    return TrainStep(_cnn(), loss, _pictures())


@KIND.add("activation checkpointing")
def checkpointing() -> TrainStep:
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Dropout(0.1))
                for _ in range(3)
            )
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    return TrainStep(Model(), _classify, _rows())


@KIND.add("spectral norm")
def spectral() -> TrainStep:
    from torch.nn.utils.parametrizations import spectral_norm

    model = nn.Sequential(
        spectral_norm(nn.Linear(FEATURES, 32)),
        nn.LeakyReLU(0.2),
        spectral_norm(nn.Linear(32, CLASSES)),
    )
    return TrainStep(model, _classify, _rows())


@KIND.add("quantization-aware training by hand")
def fake_quant() -> TrainStep:
    class Quantized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.detach().abs().max() / 127
            q = torch.clamp(torch.round(self.weight / scale), -128, 127) * scale
            w = self.weight + (q - self.weight).detach()
            return F.linear(x, w, self.bias)

    model = nn.Sequential(Quantized(FEATURES, 32), nn.ReLU(), Quantized(32, CLASSES))
    return TrainStep(model, _classify, _rows())


@KIND.add("quantization-aware training by torch.ao")
def qat() -> TrainStep:
    from torch.ao.quantization import QConfig
    from torch.ao.quantization.fake_quantize import FakeQuantize
    from torch.ao.quantization.observer import MovingAverageMinMaxObserver

    act = FakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
    )
    weight = FakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric,
    )  # fmt: skip
    config = QConfig(activation=act, weight=weight)

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.ao.nn.qat.Linear(FEATURES, 32, qconfig=config)
            self.out = nn.Linear(32, CLASSES)
            self.observed = config.activation()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.relu(self.observed(self.first(x))))

    return TrainStep(Quantized(), _classify, _rows())


# Policies.


@KIND.add("DQN")
def dqn() -> TrainStep:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.target = _mlp(4, 2), _mlp(4, 2)
            self.target.requires_grad_(False)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        q = model.policy(batch["state"]).gather(1, batch["action"])
        with torch.no_grad():
            following = model.target(batch["next"]).max(1).values
        expected = following * 0.99 * (1 - batch["done"]) + batch["reward"]
        return nn.SmoothL1Loss()(q, expected.unsqueeze(1))

    batch = {
        "state": torch.randn(ROWS, 4),
        "next": torch.randn(ROWS, 4),
        "action": torch.randint(2, (ROWS, 1)),
        "reward": torch.randn(ROWS),
        "done": torch.randint(2, (ROWS,)).float(),
    }
    return TrainStep(Model(), loss, batch)


@KIND.add("PPO")
def ppo() -> TrainStep:
    from torch.distributions import Categorical

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = _mlp(4, 3), _mlp(4, 1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        dist = Categorical(logits=model.actor(batch["state"]))
        log_prob, entropy = dist.log_prob(batch["action"]), dist.entropy().mean()
        adv = batch["return"] - batch["value"]
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        ratio = (log_prob - batch["log_prob"]).exp()
        surrogate = torch.min(ratio * adv, torch.clamp(ratio, 0.8, 1.2) * adv)
        value = model.critic(batch["state"]).squeeze(-1)
        return -surrogate.mean() + 0.5 * F.mse_loss(value, batch["return"]) - 0.01 * entropy

    batch = {
        "state": torch.randn(ROWS, 4),
        "action": torch.randint(3, (ROWS,)),
        "log_prob": -torch.rand(ROWS),
        "return": torch.randn(ROWS),
        "value": torch.randn(ROWS),
    }
    return TrainStep(Model(), loss, batch)


@KIND.add("SAC, a Gaussian policy")
def sac() -> TrainStep:
    from torch.distributions import Normal

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.q = _mlp(4, 4), _mlp(6, 1)
            self.q.requires_grad_(False)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mean, log_std = model.policy(batch["state"]).chunk(2, dim=-1)
        normal = Normal(mean, torch.clamp(log_std, -20, 2).exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(1 - y_t.pow(2) + 1e-6)
        q = model.q(torch.cat([batch["state"], y_t], 1))
        return (0.2 * log_prob.sum(1, keepdim=True) - q).mean()

    return TrainStep(Model(), loss, {"state": torch.randn(ROWS, 4)})


# Tables and structures.


class CRF(nn.Module):
    """A tagger's partition function by a loop over time (as pytorch-crf)."""

    def __init__(self, tags: int = 5) -> None:
        super().__init__()
        self.start_transitions = nn.Parameter(torch.empty(tags).uniform_(-0.1, 0.1))
        self.end_transitions = nn.Parameter(torch.empty(tags).uniform_(-0.1, 0.1))
        self.transitions = nn.Parameter(torch.empty(tags, tags).uniform_(-0.1, 0.1))

    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        length, rows = tags.shape
        mask = mask.float()
        every = torch.arange(rows)
        score = self.start_transitions[tags[0]] + emissions[0, every, tags[0]]
        for i in range(1, length):
            score += self.transitions[tags[i - 1], tags[i]] * mask[i]
            score += emissions[i, every, tags[i]] * mask[i]
        ends = mask.long().sum(dim=0) - 1
        score += self.end_transitions[tags[ends, every]]
        total = self.start_transitions + emissions[0]
        for i in range(1, length):
            following = total.unsqueeze(2) + self.transitions + emissions[i].unsqueeze(1)
            following = torch.logsumexp(following, dim=1)
            total = torch.where(mask[i].bool().unsqueeze(1), following, total)
        total = torch.logsumexp(total + self.end_transitions, dim=1)
        return (score - total).mean()


@KIND.add("BiLSTM-CRF tagger")
def crf() -> TrainStep:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16)
            self.lstm = nn.LSTM(16, 12, bidirectional=True)
            self.out, self.crf = nn.Linear(24, 5), CRF()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids, tags = batch["ids"].t(), batch["tags"].t()
        emissions = model.out(model.lstm(model.embed(ids))[0])
        return -model.crf(emissions, tags, batch["mask"].t())

    lengths = torch.randint(4, 10, (ROWS, 1))
    batch = {
        "ids": torch.randint(50, (ROWS, 9)),
        "tags": torch.randint(5, (ROWS, 9)),
        "mask": torch.arange(9) < lengths,
    }
    return TrainStep(Model(), loss, batch)


@KIND.add("NeRF, positional encoding and volume rendering")
def nerf() -> TrainStep:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(39, 32), nn.ReLU(), nn.Linear(32, 4))
            self.register_buffer("freqs", 2.0 ** torch.linspace(0, 5, 6))

        def forward(self, origins: Tensor, directions: Tensor) -> Tensor:
            t = torch.linspace(2.0, 6.0, 12)
            points = origins[:, None] + directions[:, None] * t[:, None]
            angles = (points[..., None, :] * self.freqs[:, None]).flatten(-2)
            e = torch.cat([points, angles.sin(), angles.cos()], -1)
            out = self.body(e)
            rgb, sigma = torch.sigmoid(out[..., :3]), F.relu(out[..., 3])
            delta = torch.cat([t[1:] - t[:-1], torch.tensor([1e10])])
            alpha = 1 - torch.exp(-sigma * delta)
            trans = torch.cumprod(
                torch.cat([torch.ones(alpha.shape[0], 1), 1 - alpha + 1e-10], -1), -1
            )[:, :-1]
            return ((alpha * trans)[..., None] * rgb).sum(-2)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["o"], batch["d"]), batch["rgb"])

    batch = {"o": torch.randn(ROWS, 3), "d": torch.randn(ROWS, 3), "rgb": torch.rand(ROWS, 3)}
    return TrainStep(Model(), loss, batch)


@KIND.add("physics-informed, second derivatives")
def pinn() -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"].clone().requires_grad_(True)
        u = model(x)
        du = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        d2u = torch.autograd.grad(du, x, torch.ones_like(du), create_graph=True)[0]
        residual = d2u + math.pi**2 * torch.sin(math.pi * x)
        return (residual**2).mean() + (model(batch["edge"]) ** 2).mean()

    model = nn.Sequential(
        nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )
    return TrainStep(
        model,
        loss,
        {"x": torch.rand(16, 1), "edge": torch.tensor([[0.0], [1.0]])},
        dynamic={"x": {0: "points"}},
        predict=lambda m, b: {"u": m(b["x"])},
    )


# Optimizers, and what goes around them.


def _trained_by(optimizer: str) -> TrainStep:
    step = TrainStep(_cnn(), _classify, _pictures())
    return TrainStep(step.model, step.loss, step.batch, optimizer)


KIND.add("AdamW, no decay on biases and norms")(lambda: _trained_by("no decay on vectors"))
KIND.add("SGD, layer-wise rates")(lambda: _trained_by("layer-wise"))
KIND.add("SGD, Nesterov and decay")(lambda: _trained_by("nesterov"))
KIND.add("Adam, AMSGrad and coupled decay")(lambda: _trained_by("coupled adam"))
KIND.add("RMSprop")(lambda: _trained_by("rmsprop"))
KIND.add("Adagrad")(lambda: _trained_by("adagrad"))
KIND.add("Lion")(lambda: _trained_by("lion"))
KIND.add("AdamW, warm-up and clipping")(lambda: _trained_by("recipe"))
KIND.add("accumulated gradients")(lambda: _trained_by("accumulating"))
