"""A Trainer that evaluates, and keeps, the exponential moving average of the weights."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import hvd_elastic.torch as hvd

EPOCHS = 5
WIDTH = 16


class Waves(Dataset):
    """Augmented by a noise that belongs to the example."""

    def __init__(self, examples, noise):
        self.phases = torch.linspace(0, 6.28, examples)
        self.noise = noise

    def __len__(self):
        return len(self.phases)

    def __getitem__(self, index):
        noise = torch.randn(8, generator=torch.Generator().manual_seed(index))
        wave = torch.sin(self.phases[index] + torch.arange(8) / 2)
        return wave + self.noise * noise, self.phases[index : index + 1].cos()


class Trainer:
    def __init__(self, model, train_data, test_data, lr=0.05):
        self.model = model
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        hvd.DistributedOptimizer(self.optimizer, model)
        self.loader = hvd.DataLoader(train_data, 12, shuffle=True)
        self.test_data = test_data

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.ema.update_parameters(self.model)
        return loss

    @torch.no_grad()
    def evaluate(self):
        inputs, targets = next(iter(DataLoader(self.test_data, len(self.test_data))))
        return nn.functional.mse_loss(self.ema(inputs), targets).item()

    def fit(self, state):
        for epoch in hvd.epochs(EPOCHS):
            for inputs, targets in self.loader:
                state.commit(loss=self.step(inputs, targets))
            state.history.append(self.evaluate())
            print(f"epoch {epoch}: {state.history[-1]:.4f} with averaged weights")


hvd.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
trainer = Trainer(net, Waves(48, noise=0.1), Waves(16, noise=0.0))
state = hvd.State(net, trainer.optimizer, ema=trainer.ema, history=[])
hvd.run(trainer.fit)(state)
