"""Stop when the validation loss has not fallen for some epochs, and keep the best model."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
train_loader = DataLoader(noisy(48, seed=1), batch_size=12, shuffle=True)
val_loader = DataLoader(noisy(48, seed=2), batch_size=48)
stopping = EarlyStopping()

for epoch in range(EPOCHS):
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    if stopping(validate(model, val_loader)):
        torch.save(model.state_dict(), "best.pt")
    if stopping.over:
        print(f"stopped after epoch {epoch}: {stopping.best:.4f} was the best")
        break
