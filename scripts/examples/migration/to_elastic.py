import torch
from digits_task import load, make_model, parse_arguments, test_accuracy
from torch.nn import functional as F

import hvd_elastic.torch as hvd

args = parse_arguments()
hvd.init()
torch.manual_seed(0)
device = hvd.device()
model = make_model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
loader = hvd.DataLoader(load(args.data, "train"), args.batch_size, shuffle=True)


@hvd.run
def train(state):
    for _ in hvd.epochs(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            state.commit(loss=loss)
        schedule.step()


train(hvd.State(model=model, optimizer=optimizer, schedule=schedule))
if hvd.rank() == 0:
    print(f"test accuracy {test_accuracy(model, args.data, device):.4f}")
