# Training for a number of steps, over as many passes of the data as that takes; no epochs in sight.
import math

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

EPOCHS = 5
WIDTH = 16
max_steps, warmup_steps, batch_size, lr = 5 * EPOCHS - 3, 4, 12, 1e-2

hvd.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
x = torch.randn(60, 4)
data = TensorDataset(x, x.prod(1, keepdim=True))
loader = hvd.DataLoader(data, batch_size, shuffle=True)

model = torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
optimizer = hvd.DistributedOptimizer(optimizer, model)


def rate(step):
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / (max_steps - warmup_steps)))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


@hvd.run
def train(state):
    for inputs, targets in hvd.steps(max_steps, loader):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        state.step += 1
        if state.step % 10 == 0:
            print(f"step {state.step}: loss {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:.2e}")


train(hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, step=0))
