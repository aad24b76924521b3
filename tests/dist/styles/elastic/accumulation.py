"""Gradient accumulation by hand: several batches that fit into memory make one step."""

import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

EPOCHS = 5
WIDTH = 16


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=2, help="batches in a step")
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args()


def make_data(examples=48):
    torch.manual_seed(0)
    inputs = torch.randn(examples, 8)
    return TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())


def main():
    args = parse_args()
    hvd.init()
    torch.set_default_dtype(torch.float64)
    loader = hvd.DataLoader(make_data(), args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    optimizer = hvd.DistributedOptimizer(optimizer, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)

    @hvd.run
    def train(state):
        for epoch in hvd.epochs(EPOCHS):
            for i, (inputs, targets) in enumerate(loader):
                last = (i + 1) % args.accumulate == 0
                loss = nn.functional.cross_entropy(model(inputs), targets) / args.accumulate
                with nullcontext() if last else optimizer.no_sync():
                    loss.backward()
                if last:
                    optimizer.synchronize()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            scheduler.step()

    train(hvd.State(model=model, optimizer=optimizer, scheduler=scheduler))


if __name__ == "__main__":
    main()
