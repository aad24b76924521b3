import horovod.torch as hvd
import torch
from digits_task import load, make_model, parse_arguments, test_accuracy
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

args = parse_arguments()
hvd.init()
torch.manual_seed(0)
cuda = torch.cuda.is_available()
device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
model = make_model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
dataset = load(args.data, "train")
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True)
loader = DataLoader(dataset, args.batch_size // hvd.size(), sampler=sampler)


def train():
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        schedule.step()


train()
if hvd.rank() == 0:
    print(f"test accuracy {test_accuracy(model, args.data, device):.4f}")
