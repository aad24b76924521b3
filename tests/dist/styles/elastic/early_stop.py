"""Stop when the validation loss has not fallen for some epochs, and keep the best model."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvd_elastic.torch as hvd

EPOCHS = 12
WIDTH = 16
PATIENCE = 3


class EarlyStopping:
    def __init__(self, patience=PATIENCE, delta=1e-4):
        self.patience, self.delta = patience, delta
        self.best, self.bad_epochs = float("inf"), 0

    def __call__(self, loss):
        """Returns whether the loss is the best so far."""
        better = loss < self.best - self.delta
        self.best = loss if better else self.best
        self.bad_epochs = 0 if better else self.bad_epochs + 1
        return better

    @property
    def over(self):
        return self.bad_epochs >= self.patience

    def state_dict(self):
        return {"best": self.best, "bad_epochs": self.bad_epochs}

    def load_state_dict(self, state):
        self.best, self.bad_epochs = state["best"], state["bad_epochs"]


def noisy(examples, seed):
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, 8, generator=random)
    noise = torch.randn(examples, 1, generator=random)
    return TensorDataset(inputs, inputs[:, :1].sin() + noise)


def validate(model, loader):
    model.eval()
    with torch.no_grad():
        loss = sum(nn.functional.mse_loss(model(x), y, reduction="sum") for x, y in loader)
    model.train()
    return loss.item() / len(loader.dataset)


hvd.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
optimizer = hvd.DistributedOptimizer(optimizer, model)
train_loader = hvd.DataLoader(noisy(48, seed=1), batch_size=12, shuffle=True)
val_loader = DataLoader(noisy(48, seed=2), batch_size=48)
stopping = EarlyStopping()


@hvd.run
def train(state):
    for epoch in hvd.epochs(EPOCHS):
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            state.commit(loss=loss)
        if stopping(validate(model, val_loader)):
            hvd.save("best.pt", model.state_dict())
        if stopping.over:
            hvd.stop(f"{stopping.best:.4f} was the best")


train(hvd.State(model=model, optimizer=optimizer, stopping=stopping))
