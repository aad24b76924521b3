"""A language model with warm-up, clipping, dropout, weight tying, decay groups and autocast."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

EPOCHS = 5
WIDTH = 16
LENGTH, VOCABULARY, HEADS, LAYERS, BATCH = 8, 11, 4, 2, 12
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Windows(Dataset):
    """All windows of a text; dropout is drawn by example, so that a run can be repeated exactly."""

    text = torch.randint(VOCABULARY, (48 + LENGTH,))

    def __len__(self):
        return len(self.text) - LENGTH

    def __getitem__(self, index):
        window = self.text[index : index + LENGTH + 1]
        keep = torch.rand(LENGTH, WIDTH, generator=torch.Generator().manual_seed(index)) > 0.1
        return window[:-1], window[1:], keep / 0.9


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH)
        wide, narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow)

    def forward(self, x, keep):
        parts = self.heads(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + keep * self.mix(attended.transpose(1, 2).flatten(-2))
        return x + keep * self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs, keep):
        x = self.tokens(inputs) + self.places
        for block in self.blocks:
            x = block(x, keep)
        return self.head(x)


model = Model()
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.01)
loader = DataLoader(Windows(), BATCH, shuffle=True)
steps = EPOCHS * len(Windows()) // BATCH
warmup = max(1, steps // 5)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
)

for epoch in range(EPOCHS):
    for inputs, targets, keep in loader:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs, keep)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
