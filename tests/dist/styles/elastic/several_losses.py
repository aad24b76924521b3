"""Two tasks whose losses are weighted by learned uncertainties, in a module that trains itself."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

EPOCHS = 5
WIDTH = 16


class MultiTask(nn.Module):
    def __init__(self, lr=0.02):
        super().__init__()
        self.lr = lr
        self.shared = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU())
        self.place = nn.Linear(WIDTH, 2)
        self.kind = nn.Linear(WIDTH, 3)
        self.log_variances = nn.Parameter(torch.zeros(3))

    def forward(self, inputs):
        features = self.shared(inputs)
        return features, self.place(features), self.kind(features)

    def training_step(self, batch):
        inputs, places, kinds = batch
        features, place, kind = self(inputs)
        losses = torch.stack(
            [
                F.mse_loss(place, places),
                F.cross_entropy(kind, kinds, label_smoothing=0.1),
                features.abs().mean(),
            ]
        )
        return (losses * torch.exp(-self.log_variances) + self.log_variances).sum(), losses

    def configure_optimizers(self):
        weights = [p for name, p in self.named_parameters() if name != "log_variances"]
        groups = [{"params": weights}, {"params": [self.log_variances], "lr": self.lr / 10}]
        optimizer = torch.optim.NAdam(groups, lr=self.lr)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)


def fit(module, loader, epochs):
    optimizer, scheduler = module.configure_optimizers()
    optimizer = hvd.DistributedOptimizer(optimizer, module)
    sums = hvd.Accumulator()

    @hvd.run
    def train(state):
        for epoch in hvd.epochs(epochs):
            for batch in loader:
                optimizer.zero_grad()
                loss, losses = module.training_step(batch)
                loss.backward()
                optimizer.step()
                scheduler.step()
                place, kind, size = losses.detach() * len(batch[0])
                sums.add(place=place, kind=kind, size=size, examples=len(batch[0]))
            sums.synchronize()
            place, kind, size, examples = sums.values()
            place, kind, size = place / examples, kind / examples, size / examples
            print(f"epoch {epoch}: place {place:.3f}, kind {kind:.3f}, features {size:.3f}")
            sums.clear()

    train(hvd.State(model=module, optimizer=optimizer, scheduler=scheduler))


hvd.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
inputs = torch.randn(48, 8)
data = TensorDataset(inputs, inputs[:, :2].sin(), inputs[:, 2:5].argmax(1))
fit(MultiTask(), hvd.DataLoader(data, batch_size=12, shuffle=True), EPOCHS)
