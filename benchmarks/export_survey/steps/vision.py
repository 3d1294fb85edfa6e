"""Image classification, segmentation and keypoints: torchvision, timm, segmentation-models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.export_survey.subject import Batch, Kind, TrainStep

KIND = Kind("vision")

CLASSES = 10


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"])


def images(model: nn.Module, size: int, batch: int = 4, optimizer: str = "sgd") -> TrainStep:
    return TrainStep(
        model,
        classify,
        {"image": torch.randn(batch, 3, size, size), "label": torch.randint(CLASSES, (batch,))},
        optimizer,
    )


def _torchvision(name: str, size: int, batch: int = 4, **given: Any) -> Callable[[], TrainStep]:
    def write() -> TrainStep:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **given)
        return images(model, size, batch)

    return write


def _timm(name: str, size: int, batch: int = 4, **given: Any) -> Callable[[], TrainStep]:
    def write() -> TrainStep:
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **given)
        return images(model, size, batch, "adam")

    return write


for _title, _name, _size in (
    ("ResNet-18", "resnet18", 64),
    ("MobileNetV2", "mobilenet_v2", 64),
    ("MobileNetV3-Small", "mobilenet_v3_small", 64),
    ("EfficientNet-B0", "efficientnet_b0", 64),
    ("RegNetY-400MF", "regnet_y_400mf", 64),
    ("DenseNet-121", "densenet121", 64),
    ("ShuffleNetV2 x0.5", "shufflenet_v2_x0_5", 64),
    ("SqueezeNet 1.1", "squeezenet1_1", 64),
    ("MNASNet 0.5", "mnasnet0_5", 64),
):
    KIND.add(_title, "torchvision")(_torchvision(_name, _size))

for _title, _name, _size, _given in (
    ("MobileNetV4-Small", "mobilenetv4_conv_small", 64, {}),
    ("MobileNetV3-Large (timm)", "mobilenetv3_large_100", 64, {}),
    ("EfficientNetV2-B0", "tf_efficientnetv2_b0", 64, {}),
    ("EfficientNet-B0 with drop path", "efficientnet_b0", 64,
     {"drop_path_rate": 0.2, "drop_rate": 0.2}),
    ("ConvNeXt-Atto", "convnext_atto", 64, {}),
    ("ConvNeXt-V2-Atto", "convnextv2_atto", 64, {"drop_path_rate": 0.1}),
    ("GhostNet", "ghostnet_050", 64, {}),
    ("ViT-Tiny", "vit_tiny_patch16_224", 64, {"img_size": 64, "depth": 4}),
    ("DeiT-Tiny with drop path", "deit_tiny_patch16_224", 64,
     {"img_size": 64, "depth": 4, "drop_path_rate": 0.1}),
    ("Swin-Tiny", "swin_tiny_patch4_window7_224", 64,
     {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}),
    ("MLP-Mixer", "mixer_s32_224", 64, {"img_size": 64}),
    ("MobileViT-XXS", "mobilevit_xxs", 64, {}),
    ("EdgeNeXt-XXS", "edgenext_xx_small", 64, {}),
    ("FastViT-T8", "fastvit_t8", 64, {}),
    ("RepVGG-A0", "repvgg_a0", 64, {}),
    ("LeViT-128S", "levit_128s", 224, {}),
    ("PoolFormer-S12", "poolformer_s12", 64, {}),
    ("SE-ResNet-18", "seresnet18", 64, {}),
    ("CoAtNet-Nano", "coatnet_nano_rw_224", 64, {"img_size": 64}),
    ("EfficientFormer-V2-S0", "efficientformerv2_s0", 224, {}),
):  # fmt: skip
    KIND.add(_title, "timm")(_timm(_name, _size, 2 if _size > 100 else 4, **_given))


KIND.add("ResNet-50, a quarter wide", "torchvision")(
    _torchvision("resnet50", 64, width_per_group=16)
)
KIND.add("ResNeXt-50, narrow", "torchvision")(
    _torchvision("resnet50", 64, groups=8, width_per_group=2)
)


def _headed(name: str, size: int) -> Callable[[], TrainStep]:
    """With a small classifier in place of ImageNet's three layers."""

    def write() -> TrainStep:
        import torchvision

        model = torchvision.models.get_model(name, weights=None)
        model.classifier = nn.Sequential(nn.Dropout(0.5), nn.LazyLinear(CLASSES))
        step = images(model, size)
        model(step.batch["image"])
        return step

    return write


KIND.add("VGG-11 with batch norm", "torchvision")(_headed("vgg11_bn", 32))
KIND.add("AlexNet", "torchvision")(_headed("alexnet", 64))


@KIND.add("ViT-B/16, narrow", "torchvision")
def vision_transformer() -> TrainStep:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=64, patch_size=16, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=128,
        dropout=0.1, num_classes=CLASSES,
    )  # fmt: skip
    return images(model, 64, optimizer="adam")


@KIND.add("Swin-T with stochastic depth", "torchvision")
def swin() -> TrainStep:
    from torchvision.models import SwinTransformer

    model = SwinTransformer(
        patch_size=[4, 4], embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4],
        stochastic_depth_prob=0.2, num_classes=CLASSES,
    )  # fmt: skip
    return images(model, 64, optimizer="adam")


@KIND.add("Inception-V3 with its auxiliary head", "torchvision")
def inception() -> TrainStep:
    import torchvision

    model = torchvision.models.inception_v3(
        weights=None, num_classes=CLASSES, init_weights=False, aux_logits=True
    )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits, auxiliary = model(batch["image"])
        return F.cross_entropy(logits, batch["label"]) + 0.4 * F.cross_entropy(
            auxiliary, batch["label"]
        )

    def whole(model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch) if model.training else classify(model, batch)

    step = images(model, 299, 2)
    return TrainStep(model, whole, step.batch, "sgd")


@KIND.add("DeepLabV3 on MobileNetV3", "torchvision")
def deeplab() -> TrainStep:
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    model = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["image"])["out"], batch["mask"])

    batch = {"image": torch.randn(2, 3, 64, 64), "mask": torch.randint(4, (2, 64, 64))}
    return TrainStep(model, loss, batch)


@KIND.add("LR-ASPP on MobileNetV3", "torchvision")
def lraspp() -> TrainStep:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["image"])["out"], batch["mask"], ignore_index=255)

    batch = {"image": torch.randn(2, 3, 64, 64), "mask": torch.randint(4, (2, 64, 64))}
    return TrainStep(model, loss, batch)


def _segmentation(name: str, encoder: str, **given: Any) -> Callable[[], TrainStep]:
    def write() -> TrainStep:
        import segmentation_models_pytorch as smp

        model = smp.create_model(name, encoder, encoder_weights=None, classes=1, **given)
        dice = smp.losses.DiceLoss("binary")

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            logits = model(batch["image"])
            found: Tensor = dice(logits, batch["mask"])
            return found + F.binary_cross_entropy_with_logits(logits, batch["mask"])

        batch = {
            "image": torch.randn(2, 3, 64, 64),
            "mask": torch.randint(2, (2, 1, 64, 64)).float(),
        }
        return TrainStep(model, loss, batch)

    return write


for _title, _name, _encoder in (
    ("U-Net on ResNet-18", "unet", "resnet18"),
    ("U-Net++ on MobileNetV2", "unetplusplus", "mobilenet_v2"),
    ("FPN on MobileNetV2", "fpn", "mobilenet_v2"),
    ("DeepLabV3+ on MobileNetV2", "deeplabv3plus", "mobilenet_v2"),
    ("LinkNet on MobileNetV2", "linknet", "mobilenet_v2"),
    ("SegFormer decoder on MobileNetV2", "segformer", "mobilenet_v2"),
):
    KIND.add(_title, "segmentation_models_pytorch")(_segmentation(_name, _encoder))


class DoubleConv(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Ronneberger et al. 2015, as most public code has it: padded, bilinear or transposed."""

    def __init__(self, channels: int, classes: int, width: int, bilinear: bool) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(4)]
        self.inc = DoubleConv(channels, width)
        self.downs = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(a, b)) for a, b in zip(widths, widths[1:])
        )
        self.ups = nn.ModuleList()
        self.convs = nn.ModuleList()
        for a, b in zip(widths[::-1], widths[-2::-1]):
            if bilinear:
                self.ups.append(
                    nn.Sequential(
                        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
                        nn.Conv2d(a, b, 1),
                    )
                )
            else:
                self.ups.append(nn.ConvTranspose2d(a, b, 2, stride=2))
            self.convs.append(DoubleConv(2 * b, b))
        self.outc = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.inc(x)]
        for down in self.downs:
            kept.append(down(kept[-1]))
        x = kept.pop()
        for up, conv in zip(self.ups, self.convs):
            x, skip = up(x), kept.pop()
            dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
            x = conv(torch.cat([skip, x], dim=1))
        return self.outc(x)


def _unet(bilinear: bool) -> TrainStep:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["image"]), batch["mask"])

    batch = {"image": torch.randn(2, 3, 64, 64), "mask": torch.randint(3, (2, 64, 64))}
    return TrainStep(UNet(3, 3, 16, bilinear), loss, batch)


KIND.add("U-Net, bilinear")(lambda: _unet(True))
KIND.add("U-Net, transposed")(lambda: _unet(False))


class BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


@KIND.add("ResNet-20 for CIFAR")
def resnet20() -> TrainStep:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    before = 16
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        for step in [stride, 1, 1]:
            layers.append(BasicBlock(before, width, step))
            before = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    return images(model, 32, 8)


class ConvMixer(nn.Sequential):
    """Trockman and Kolter 2022."""

    def __init__(self, dim: int, depth: int, kernel_size: int, patch_size: int) -> None:
        class Residual(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + x

        super().__init__(
            nn.Conv2d(3, dim, kernel_size=patch_size, stride=patch_size),
            nn.GELU(),
            nn.BatchNorm2d(dim),
            *[
                nn.Sequential(
                    Residual(
                        nn.Conv2d(dim, dim, kernel_size, groups=dim, padding="same"),
                        nn.GELU(),
                        nn.BatchNorm2d(dim),
                    ),
                    nn.Conv2d(dim, dim, kernel_size=1),
                    nn.GELU(),
                    nn.BatchNorm2d(dim),
                )
                for _ in range(depth)
            ],
            nn.AdaptiveAvgPool2d((1, 1)),
            nn.Flatten(),
            nn.Linear(dim, CLASSES),
        )


@KIND.add("ConvMixer")
def convmixer() -> TrainStep:
    return images(ConvMixer(64, 4, 9, 4), 64, optimizer="adam")
