"""Transfer learning: the new head is trained alone, then the backbone with it at a lower rate."""

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import hvd_elastic.torch as hvd

EPOCHS = 5
WIDTH = 16
UNFREEZE_AT = 2


class Classifier(nn.Module):
    def __init__(self, backbone, num_classes):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def pretrained_backbone():
    return nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())


def set_trainable(module, trainable):
    for param in module.parameters():
        param.requires_grad = trainable


@hvd.run
def train_model(state, model, criterion, optimizer, scheduler, dataloader, num_epochs):
    for epoch in hvd.epochs(num_epochs):
        if epoch == UNFREEZE_AT:
            set_trainable(model.backbone, True)
        model.train()
        for inputs, labels in dataloader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            state.commit(loss=loss)
        scheduler.step()
    return model


hvd.init()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
images = torch.randn(48, 8)
dataset = TensorDataset(images, images[:, :3].argmax(1))
dataloader = hvd.DataLoader(dataset, batch_size=12, shuffle=True)

model_ft = Classifier(pretrained_backbone(), num_classes=3)
set_trainable(model_ft.backbone, False)
optimizer_ft = optim.Adam(
    [
        {"params": model_ft.head.parameters(), "lr": 1e-2},
        {"params": model_ft.backbone.parameters(), "lr": 1e-3},
    ]
)
optimizer_ft = hvd.DistributedOptimizer(optimizer_ft, model_ft)
exp_lr_scheduler = lr_scheduler.StepLR(optimizer_ft, step_size=2, gamma=0.5)
state = hvd.State(model=model_ft, optimizer=optimizer_ft, scheduler=exp_lr_scheduler)
train_model(
    state, model_ft, nn.CrossEntropyLoss(), optimizer_ft, exp_lr_scheduler, dataloader, EPOCHS
)
