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
schedule = hvd.follow_progress(schedule, per="epoch")
dataset = load(args.data, "train")
bounds = (8, 256)
loader = hvd.DataLoader(
    dataset,
    batch_size=args.batch_size,
    shuffle=True,
    max_batch_size=args.max_batch_size,
    atomic_batch_size_bounds=bounds,
)
totals = hvd.Accumulator()


@hvd.run
def train(state):
    for epoch in hvd.epochs(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            totals.add(loss=loss * len(labels), examples=len(labels))
            state.commit(loss=loss)
        schedule.step()
        totals.synchronize()
        if hvd.rank() == 0 and totals:
            print(f"epoch {epoch}: loss {totals['loss'] / totals['examples']:.4f}")
        totals.clear()


train(hvd.State(model=model, optimizer=optimizer, schedule=schedule))
if hvd.rank() == 0:
    print(f"test accuracy {test_accuracy(model, args.data, device):.4f}")
