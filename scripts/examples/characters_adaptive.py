"""Train a small transformer to write Python, character by character, with a batch that adapts.

Its text is on every machine: the sources of Python's own standard library. Where the hosts of a run
have different releases of Python, give all of them the same file with --text.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import hvd_elastic.torch as hvd

parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
parser.add_argument("--text", type=Path, help="file to learn from (default: standard library)")
parser.add_argument("--characters", type=int, default=1_000_000, help="how many of it")
parser.add_argument("--context", type=int, default=64, help="characters that are looked at")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3, help="at the initial batch size")
parser.add_argument("--batch-size", type=int, default=32, help="initial")
parser.add_argument("--max-batch-size", type=int, default=512)
parser.add_argument("--lr", type=float, default=1e-3, help="for the initial batch size")
parser.add_argument("--warmup", type=int, default=100, help="steps until the full learning rate")
parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
args = parser.parse_args()


def read_text():
    if args.text is not None:
        return args.text.read_bytes()[: args.characters]
    found = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= args.characters:
            break
    return found[: args.characters]


class Windows(Dataset):
    """Pieces of the text, each with the same piece one character on."""

    def __init__(self, text):
        self.codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self):
        return (len(self.codes) - 1) // args.context

    def __getitem__(self, index):
        piece = self.codes[index * args.context :][: args.context + 1]
        return piece[:-1], piece[1:]


class Writer(nn.Module):
    """A transformer that sees nothing of what comes after a character."""

    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(256, args.width)
        self.places = nn.Embedding(args.context, args.width)
        layer = nn.TransformerEncoderLayer(
            *(args.width, 4, 4 * args.width), dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.head = nn.Linear(args.width, 256)

    def forward(self, codes):
        length = codes.shape[1]
        places = self.places(torch.arange(length, device=codes.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        return self.head(self.layers(self.characters(codes) + places, mask, is_causal=True))


def bits_per_character(model, windows):
    inputs, targets = (torch.stack(part).to(device) for part in zip(*windows, strict=True))
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    return loss.item() / math.log(2)


def write(model, count):
    codes = list(b"def ")
    while len(codes) < count:
        seen = torch.tensor([codes[-args.context :]], device=device)
        with torch.no_grad():
            chances = model(seen)[0, -1].softmax(0)
        codes.append(int(torch.multinomial(chances, 1)))
    return bytes(codes).decode(errors="replace")


hvd.init()
torch.manual_seed(0)
device = hvd.device()
text = read_text()
cut = int(0.95 * len(text))
model = Writer().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
optimizer = hvd.DistributedOptimizer(optimizer, model)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=args.warmup)
warmup = hvd.follow_progress(warmup)
loader = hvd.DataLoader(
    Windows(text[:cut]), args.batch_size, shuffle=True, max_batch_size=args.max_batch_size
)
totals = hvd.Accumulator()


@hvd.run
def train(state):
    for epoch in hvd.epochs(args.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            scores = model(inputs.to(device)).flatten(0, 1)
            loss = F.cross_entropy(scores, targets.to(device).flatten())
            loss.backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            totals.add(loss=loss * len(inputs), examples=len(inputs))
            state.commit(loss=loss)
        totals.synchronize()
        if hvd.rank() == 0 and totals:
            print(f"pass {epoch}: loss {totals['loss'] / totals['examples']:.3f}")
        totals.clear()


train(hvd.State(model=model, optimizer=optimizer, warmup=warmup))
model.eval()
held_out = Windows(text[cut:])
bits = bits_per_character(model, [held_out[i] for i in range(min(len(held_out), 256))])
hvd.report(bits_per_character=bits)
if hvd.rank() == 0:
    print(f"{bits:.2f} bits per character of text it has not seen")
    if args.sample:
        print(write(model, args.sample))
