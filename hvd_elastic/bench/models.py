"""ResNet with bottleneck blocks for images, and GPT-2 for text, in plain PyTorch.

Source of ResNet: He et al., "Deep Residual Learning for Image Recognition", 2015; the stride of 2
is in the 3x3 convolution of a block ("ResNet v1.5"), as in torchvision, whose parameter names these
are. So weights of torchvision load.
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


_INIT_STD = 0.02
"""Standard deviation of initial weights (GPT-2's source code)."""


class Block(nn.Module):
    """Transformer block: causal self-attention and a perceptron, each with a residual.

    Args:
        width: size of a token's vector.
        heads: number of attention heads; ``width`` is a multiple of it.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output; shape (N, T, width), as the input."""
        batch, tokens, width = x.shape
        parts = self.attention(self.ln_1(x)).view(batch, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.contract(F.gelu(self.expand(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2; the defaults are its smallest size, with 124,439,808 parameters.

    Args:
        context: largest number of tokens in a sequence.
        width: size of a token's vector.
    """

    def __init__(
        self,
        vocabulary: int = 50257,
        context: int = 1024,
        layers: int = 12,
        heads: int = 12,
        width: int = 768,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln = nn.LayerNorm(width)
        # A residual adds the outputs of 2 * layers projections, so each begins smaller.
        residual_std = _INIT_STD / (2 * layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("projection.weight", "contract.weight")):
                nn.init.normal_(parameter, std=residual_std)
            elif "ln" not in name:
                nn.init.normal_(parameter, std=_INIT_STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at every position.

        Args:
            tokens: token numbers; shape (N, T) with T up to ``context``.

        Returns:
            Logits; shape (N, T, vocabulary).
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(places))
        return F.linear(self.ln(x), self.tokens.weight)
