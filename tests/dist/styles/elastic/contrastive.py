"""Momentum contrast: a queue of earlier keys, and a key encoder that follows the query encoder."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import hvd_elastic.torch as hvd

EPOCHS = 5
WIDTH = 16
DIM, QUEUE, MOMENTUM, TEMPERATURE = 6, 36, 0.9, 0.2


class TwoViews(Dataset):
    """Two augmentations of each image, drawn by the image's number."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def augment(self, index, view):
        random = torch.Generator().manual_seed(2 * index + view)
        image = self.images[index]
        return image * (torch.rand(image.shape, generator=random) > 0.2)

    def __getitem__(self, index):
        return self.augment(index, 0), self.augment(index, 1)


class Queue:
    """The newest keys; the oldest are overwritten."""

    def __init__(self):
        self.keys = F.normalize(torch.randn(QUEUE, DIM), dim=1)
        self.at = 0

    def put(self, keys):
        places = torch.arange(self.at, self.at + len(keys)) % QUEUE
        self.keys[places] = keys
        self.at = (self.at + len(keys)) % QUEUE

    def state_dict(self):
        return {"keys": self.keys, "at": self.at}

    def load_state_dict(self, state):
        self.keys, self.at = state["keys"], state["at"]


def main():
    hvd.init()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    query_encoder = nn.Sequential(nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, DIM))
    key_encoder = copy.deepcopy(query_encoder).requires_grad_(False)
    queue = Queue()
    optimizer = torch.optim.SGD(query_encoder.parameters(), lr=0.1, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, query_encoder)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    loader = hvd.DataLoader(TwoViews(torch.rand(48, 12)), batch_size=12, shuffle=True)

    @hvd.run
    def train(state):
        for epoch in hvd.epochs(EPOCHS):
            for one, other in loader:
                queries = F.normalize(query_encoder(one), dim=1)
                keys = F.normalize(key_encoder(other), dim=1)
                same = (queries * keys).sum(1, keepdim=True)
                logits = torch.cat([same, queries @ queue.keys.T], 1) / TEMPERATURE
                loss = F.cross_entropy(logits, torch.zeros(len(one), dtype=torch.long))
                keys = hvd.allgather(keys, "keys")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for key, query in zip(key_encoder.parameters(), query_encoder.parameters()):
                        key.lerp_(query, 1 - MOMENTUM)
                queue.put(keys)
            scheduler.step()

    train(
        hvd.State(
            query_encoder=query_encoder,
            key_encoder=key_encoder,
            optimizer=optimizer,
            scheduler=scheduler,
            queue=queue,
        )
    )


main()
