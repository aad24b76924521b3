import torch
from digits_task import load, make_model, parse_arguments, test_accuracy
from torch.nn import functional as F
from torch.utils.data import DataLoader

args = parse_arguments()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = make_model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
loader = DataLoader(load(args.data, "train"), args.batch_size, shuffle=True)


def train():
    for _ in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        schedule.step()


train()
print(f"test accuracy {test_accuracy(model, args.data, device):.4f}")
