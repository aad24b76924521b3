import adaptdl.env
import adaptdl.torch
import torch
from digits_task import load, make_model, parse_arguments, test_accuracy
from torch.nn import functional as F

args = parse_arguments()
adaptdl.torch.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = make_model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
model = adaptdl.torch.AdaptiveDataParallel(model, optimizer, schedule)
dataset = load(args.data, "train")
loader = adaptdl.torch.AdaptiveDataLoader(dataset, batch_size=args.batch_size, shuffle=True)
bounds = (8, 256)
loader.autoscale_batch_size(
    args.max_batch_size, local_bsz_bounds=bounds, gradient_accumulation=True
)


def train():
    for epoch in adaptdl.torch.remaining_epochs_until(args.epochs):
        totals = adaptdl.torch.Accumulator()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            totals["loss"] += loss.item() * len(labels)
            totals["examples"] += len(labels)
        schedule.step()
        with totals.synchronized():
            if adaptdl.env.replica_rank() == 0:
                print(f"epoch {epoch}: loss {totals['loss'] / totals['examples']:.4f}")


train()
if adaptdl.env.replica_rank() == 0:
    print(f"test accuracy {test_accuracy(model, args.data, device):.4f}")
