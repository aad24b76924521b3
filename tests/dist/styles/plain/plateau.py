import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split

EPOCHS = 6
WIDTH = 16
torch.set_default_dtype(torch.float64)
torch.manual_seed(42)

X = torch.randn(72, 6)
y = (X[:, 0] + 0.5 * X[:, 1] ** 2 + 0.3 * torch.randn(72)).unsqueeze(1)
train_set, val_set = random_split(TensorDataset(X, y), [48, 24])
train_dl = DataLoader(train_set, batch_size=12, shuffle=True)
val_dl = DataLoader(val_set, batch_size=24)

net = nn.Sequential(nn.Linear(6, WIDTH), nn.ELU(), nn.Linear(WIDTH, 1))
loss_fn = nn.HuberLoss()
opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.3, patience=0)

history = []
for epoch in range(EPOCHS):
    net.train()
    for xb, yb in train_dl:
        opt.zero_grad()
        loss = loss_fn(net(xb), yb)
        loss.backward()
        opt.step()

    net.eval()
    with torch.no_grad():
        val_loss = sum(loss_fn(net(xb), yb).item() for xb, yb in val_dl) / len(val_dl)
    sched.step(val_loss)
    history.append(val_loss)
    print(f"epoch {epoch}  val {val_loss:.4f}  lr {opt.param_groups[0]['lr']:.4f}")
