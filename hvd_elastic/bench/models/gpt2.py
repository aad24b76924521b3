"""GPT-2 for text, in plain PyTorch.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019: a decoder with
layer normalisation before each block and one at the end, GELU in its tanh form, and the same
weights for the input embedding and the output.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

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
        vocabulary: number of tokens of the vocabulary.
        context: largest number of tokens in a sequence.
        layers: number of blocks.
        heads: number of attention heads of a block.
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
