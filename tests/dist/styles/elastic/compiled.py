"""A compiled model; compiling takes far longer than a step."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

EPOCHS = 5
WIDTH = 16
BACKEND = "aot_eager"


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


hvd.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, WIDTH), Residual(), Residual(), nn.Linear(WIDTH, 1))
compiled = torch.compile(model, backend=BACKEND, dynamic=True)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
optimizer = hvd.DistributedOptimizer(optimizer, model)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=4 * EPOCHS)
inputs = torch.randn(48, 8)
data = TensorDataset(inputs, inputs.norm(dim=1, keepdim=True))
loader = hvd.DataLoader(data, 12, shuffle=True)


def warm_up():
    compiled(inputs[:4]).sum().backward()
    optimizer.zero_grad()


def train(state):
    for epoch in hvd.epochs(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.smooth_l1_loss(compiled(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            state.commit(loss=loss)


state = hvd.State(model=model, optimizer=optimizer, scheduler=scheduler)
hvd.run(train, warmup=warm_up)(state)
torch.save(model.state_dict(), "model.pt")
