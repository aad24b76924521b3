import horovod.torch as hvd
import torch
from digits_task import load, make_model, parse_arguments, test_accuracy
from torch.nn import functional as F
from torch.utils.data import DataLoader

args = parse_arguments()
hvd.init()
torch.manual_seed(0)
cuda = torch.cuda.is_available()
device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
model = make_model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
dataset = load(args.data, "train")
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)


@hvd.elastic.run
def train(state):
    share = max(1, args.batch_size // hvd.size())
    loader = DataLoader(dataset, share, sampler=sampler)
    for state.epoch in range(state.epoch, args.epochs):  # noqa: B020
        for batch, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(batch, share)
            state.commit()
        schedule.step()
        state.sampler.set_epoch(state.epoch + 1)
        state.commit()


train(hvd.elastic.TorchState(model, optimizer, schedule=schedule, sampler=sampler, epoch=0))
if hvd.rank() == 0:
    print(f"test accuracy {test_accuracy(model, args.data, device):.4f}")
