"""A compiled model; compiling takes far longer than a step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, WIDTH), Residual(), Residual(), nn.Linear(WIDTH, 1))
compiled = torch.compile(model, backend=BACKEND, dynamic=True)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=4 * EPOCHS)
inputs = torch.randn(48, 8)
data = TensorDataset(inputs, inputs.norm(dim=1, keepdim=True))
loader = DataLoader(data, 12, shuffle=True)

for epoch in range(EPOCHS):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(compiled(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
torch.save(model.state_dict(), "model.pt")
