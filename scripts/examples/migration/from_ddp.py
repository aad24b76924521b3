import os

import torch
import torch.distributed as dist
from digits_task import load, make_model, parse_arguments, test_accuracy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

args = parse_arguments()
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
torch.manual_seed(0)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
model = make_model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
first_epoch = 0
if args.snapshot.exists():
    snapshot = torch.load(args.snapshot, map_location=device)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    schedule.load_state_dict(snapshot["schedule"])
    first_epoch = snapshot["epoch"]
parallel = DistributedDataParallel(model)
dataset = load(args.data, "train")
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, args.batch_size // dist.get_world_size(), sampler=sampler)


def save_snapshot(epoch):
    snapshot = {"epoch": epoch, "model": model.state_dict()}
    snapshot["optimizer"] = optimizer.state_dict()
    snapshot["schedule"] = schedule.state_dict()
    part = args.snapshot.with_suffix(".part")
    torch.save(snapshot, part)
    part.replace(args.snapshot)


def train():
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(parallel(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        schedule.step()
        if dist.get_rank() == 0:
            save_snapshot(epoch + 1)


train()
if dist.get_rank() == 0:
    print(f"test accuracy {test_accuracy(model, args.data, device):.4f}")
dist.destroy_process_group()
