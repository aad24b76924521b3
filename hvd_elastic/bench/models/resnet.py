"""ResNet with bottleneck blocks for images, in plain PyTorch.

Source: He et al., "Deep Residual Learning for Image Recognition", 2015; the stride of 2 is in the
3x3 convolution of a block ("ResNet v1.5"), as in torchvision, whose parameter names these are. So
weights of torchvision load.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

_EXPANSION = 4
"""Output channels of a bottleneck block relative to its inner ones (He et al., table 1)."""


class Bottleneck(nn.Module):
    """Residual block of a 1x1, a 3x3 and a 1x1 convolution.

    Args:
        channels: number of input channels.
        width: number of channels of the 3x3 convolution; the block returns four times as many.
        stride: stride of the 3x3 convolution.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * _EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output; shape (N, 4 width, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(y + shortcut, inplace=True)


class ResNet(nn.Module):
    """ResNet with bottleneck blocks.

    Args:
        blocks: number of blocks of each of the four stages.
        classes: number of classes.
        zero_init_residual: whether the last batch normalisation of each block begins with weight 0,
            so that each block begins as the identity (Goyal et al., 2017, section 5.1).
    """

    def __init__(
        self, blocks: Sequence[int], classes: int = 1000, *, zero_init_residual: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels = 64
        for stage, number in enumerate(blocks):
            width = 64 << stage
            stack = []
            for block in range(number):
                stride = 2 if stage and not block else 1
                stack.append(Bottleneck(channels, width, stride))
                channels = width * _EXPANSION
            setattr(self, f"layer{stage + 1}", nn.Sequential(*stack))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck) and zero_init_residual:
                nn.init.zeros_(module.bn3.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits.

        Args:
            images: normalised images; shape (N, 3, H, W), usually 224 x 224.

        Returns:
            Logits; shape (N, classes).
        """
        x = self.maxpool(F.relu(self.bn1(self.conv1(images)), inplace=True))
        for stage in range(4):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


resnet50 = partial(ResNet, (3, 4, 6, 3))
"""ResNet-50: 25,557,032 parameters with 1000 classes."""
