"""Train a ResNet on ImageNet, or pictures in its layout, by the published large-batch recipe.

- SGD with momentum, a rate of 0.1 for each 256 examples of the batch, five epochs of warm-up, no
  decay of biases and batch norm: Goyal et al., Accurate, large minibatch SGD, 2017; cosine decay
  and label smoothing: He et al., Bag of tricks for image classification, 2019.
- LARS for batches of more than 8192: You et al., Large batch training of convolutional networks,
  2017, with polynomial decay.
- With --max-batch-size the batch and its rate follow the gradient noise.

The files are DATA/train/CLASS/*.JPEG and DATA/val/CLASS/*.JPEG: ImageNet itself, pictures of your
own, or what datasets_prep/imagenet_layout.py draws; or shards of them (datasets_prep/imagenet.py).
"""

import argparse
import math
import random
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import hvd_elastic.torch as hvd
from hvd_elastic.data import CentreCrop, RandomCrop, ShardDataset

SUFFIXES = (".jpeg", ".jpg", ".png")
STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train/ and val/")
    parser.add_argument("--depth", type=int, choices=STAGES, default=50, help="of the ResNet")
    parser.add_argument(
        "--width", type=int, default=64, help="channels that the ResNet begins with"
    )
    parser.add_argument("--image-size", type=int, default=224, help="pixels it is trained on")
    parser.add_argument("--crop", type=float, default=0.25, help="least share of a picture to see")
    parser.add_argument("--workers", type=int, default=4, help="processes of a rank that decode")
    parser.add_argument("--epochs", type=int, default=90, help="at the initial batch size")
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument("--max-batch-size", type=int, help="let the batch adapt, up to this size")
    parser.add_argument("--optimizer", choices=("sgd", "lars"), default="sgd")
    parser.add_argument("--lr", type=float, help="default of sgd: 0.1 x batch size / 256")
    parser.add_argument("--warmup", type=float, default=5, help="epochs until the full rate")
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "float16"), default="float32"
    )
    parser.add_argument(
        "--evaluate", metavar="RUN|FILE", help="only evaluate these weights on val/"
    )
    args = parser.parse_args()
    least = {"image_size": 32, "width": 1, "epochs": 1, "batch_size": 1, "workers": 0, "warmup": 0}
    for name, limit in least.items():
        if getattr(args, name) < limit:
            option = "--" + name.replace("_", "-")
            parser.error(f"{option} {getattr(args, name)}: it must be {limit} or more")
    if args.lr is None and args.optimizer == "lars":
        parser.error("--optimizer lars: its rate does not follow from the batch size; give --lr")
    if args.lr is None:
        args.lr = 0.1 * args.batch_size / 256
    if not 0 <= args.label_smoothing < 1:
        parser.error(f"--label-smoothing {args.label_smoothing}: it must be 0 or more and below 1")
    if not 0 < args.crop <= 1:
        parser.error(f"--crop {args.crop}: it must be above 0 and at most 1")
    if not (args.data / "train").is_dir():
        parser.error(
            f"--data {args.data}: there is no folder train in it; one is made by: python "
            f"datasets_prep/imagenet_layout.py --out {args.data}"
        )
    return args


class Pictures(Dataset):
    """Pictures in folders named for their classes, each with the number of its class.

    With ``crop`` a part of random size and place, mirrored or not; without the middle of it.
    """

    def __init__(self, folder, classes, size, crop=None):
        self.folder, self.size, self.crop = folder, size, crop
        self.names, self.labels = [], []
        for label, name in enumerate(classes):
            inside = (folder / name).iterdir() if (folder / name).is_dir() else ()
            for path in sorted(inside):
                if path.suffix.lower() in SUFFIXES and not path.name.startswith("."):
                    self.names.append(f"{name}/{path.name}")
                    self.labels.append(label)
        if not self.names:
            sys.exit(f"error: no pictures in {folder}/CLASS/; their names end in {SUFFIXES}")

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        path = self.folder / self.names[index]
        try:
            with Image.open(path) as image:
                box = self.part(*image.size)
                pixels = image.convert("RGB").resize(
                    (self.size, self.size), box=box, reducing_gap=2
                )
        except (OSError, SyntaxError) as error:  # the latter of a broken PNG
            hint = "datasets_prep/imagenet_layout.py --verify finds all broken files"
            raise RuntimeError(f"{path} cannot be read ({error}); {hint}") from None
        pixels = np.array(pixels)
        if self.crop is not None and random.random() < 0.5:
            pixels = pixels[:, ::-1].copy()
        return torch.from_numpy(pixels).permute(2, 0, 1), self.labels[index]

    def part(self, width, height):
        if self.crop is None:
            side = 0.875 * min(width, height)
            across = down = side
        else:  # Szegedy et al., Going deeper with convolutions, 2015, section 6
            area = width * height * random.uniform(self.crop, 1)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            across = min(width, math.sqrt(area * ratio))
            down = min(height, math.sqrt(area / ratio))
        free = (width - across, height - down)
        left, top = (gap * (0.5 if self.crop is None else random.random()) for gap in free)
        return left, top, left + across, top + down


def to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def read(args):
    """Training and validation pictures, and the names of their classes."""
    train, val = args.data / "train", args.data / "val"
    if (train / "index.json").exists():
        examples = ShardDataset(
            train, to_tensor, decode=RandomCrop(args.image_size, scale=(args.crop, 1))
        )
        held_out = ShardDataset(val, to_tensor, decode=CentreCrop(args.image_size))
        if not examples.classes:
            sys.exit(
                f"error: the index of {train} names no classes; give it their names: python "
                f"datasets_prep/index_shards.py {train} --classes FILE"
            )
        return examples, held_out, examples.classes
    classes = sorted(entry.name for entry in train.iterdir() if entry.is_dir())
    examples = Pictures(train, classes, args.image_size, args.crop)
    return examples, Pictures(val, classes, args.image_size), classes


class Block(nn.Module):
    """A few convolutions beside a way round them; the stride is in that of 3 x 3."""

    def __init__(self, inputs, width, stride, narrow):
        super().__init__()
        sizes = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
        sizes = sizes if narrow else [(width, 3, stride), (width, 3, 1)]
        layers, channels = [], inputs
        for outputs, size, step in sizes:
            layers += [nn.Conv2d(channels, outputs, size, step, size // 2, bias=False)]
            layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            channels = outputs
        self.main = nn.Sequential(*layers[:-1])
        nn.init.zeros_(self.main[-1].weight)  # Goyal et al. 2017: it begins as the way round alone
        self.round = nn.Identity()
        if stride > 1 or inputs != channels:
            self.round = nn.Sequential(
                nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, inputs):
        return F.relu(self.main(inputs) + self.round(inputs))


class ResNet(nn.Sequential):
    """He et al., Deep residual learning for image recognition, 2016."""

    def __init__(self, depth, width, classes):
        narrow = depth >= 50
        layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = width
        for stage, count in enumerate(STAGES[depth]):
            for number in range(count):
                stride = 2 if stage and not number else 1
                layers.append(Block(channels, width * 2**stage, stride, narrow))
                channels = width * 2**stage * (4 if narrow else 1)
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        super().__init__(*layers)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")


class LARS(torch.optim.Optimizer):
    """SGD with momentum and a rate for each layer, by the norms of its weights and gradient.

    You et al. 2017, algorithm 1. Vectors (biases, batch norm) take the rate as it is.
    """

    def __init__(self, parameters, lr, momentum=0.9, weight_decay=1e-4, trust=0.001):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            decay = group["weight_decay"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                change, rate = weight.grad.add(weight, alpha=decay), group["lr"]
                if weight.ndim > 1:
                    size = weight.norm()
                    ratio = group["trust"] * size / (weight.grad.norm() + decay * size)
                    change = change * torch.where(ratio.isfinite() & (size > 0), ratio, 1.0)
                state = self.state[weight]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].mul_(group["momentum"]).add_(change, alpha=rate)
                weight.sub_(state["momentum"])


def make_optimizer(args, model):
    """The optimizer of the recipe; biases and batch norm do not decay."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if args.optimizer == "lars":
        return LARS(groups, args.lr)
    return torch.optim.SGD(groups, args.lr, momentum=0.9)


def rate_of(args, steps_of_epoch):
    """The share of the full rate at a step: warm-up, then cosine (SGD) or polynomial (LARS)."""
    last, warm = args.epochs * steps_of_epoch, args.warmup * steps_of_epoch

    def rate(step):
        if step < warm:
            return (step + 1) / (warm + 1)
        gone = min(1, (step - warm) / max(1, last - warm))
        return (1 - gone) ** 2 if args.optimizer == "lars" else 0.5 * (1 + math.cos(math.pi * gone))

    return rate


def hits_within(count, outputs, labels):
    """Whether the label of each picture is among the best ``count`` classes."""
    best = outputs.topk(min(count, outputs.shape[1])).indices
    return (best == labels[:, None]).any(1)


def main():
    args = parse()
    examples, held_out, classes = read(args)
    most = args.max_batch_size or args.batch_size
    if not args.evaluate and not args.batch_size <= min(len(examples), most):
        sys.exit(
            f"error: --batch-size {args.batch_size}: it must be at most --max-batch-size "
            f"({most}) and what there is to train on ({len(examples)} pictures)"
        )

    hvd.init()
    torch.manual_seed(0)
    device = hvd.device()
    precision = getattr(torch, args.precision)
    mixed = {"device_type": device.type, "dtype": precision, "enabled": precision != torch.float32}
    model = ResNet(args.depth, args.width, len(classes)).to(device)
    mean, deviation = (
        torch.tensor(values, device=device).view(3, 1, 1)
        for values in ((123.7, 116.3, 103.5), (58.4, 57.1, 57.4))
    )

    def forward(images):
        with torch.autocast(**mixed):
            images = images.to(device, non_blocking=True).float()
            return model((images - mean) / deviation)

    def evaluate():
        """Means over all pictures of val/, the same on all ranks."""
        metrics = {
            "validation_loss": lambda outputs, labels: F.cross_entropy(
                outputs, labels, reduction="none"
            ),
            "top1": lambda outputs, labels: hits_within(1, outputs, labels),
            "top5": lambda outputs, labels: hits_within(5, outputs, labels),
        }
        return hvd.evaluate(
            model,
            held_out,
            metrics,
            batch_size=min(args.batch_size, 64),
            forward=lambda batch: (forward(batch[0]).float(), batch[1]),
            num_workers=args.workers,
        )

    if args.evaluate:

        @hvd.run
        def measure(_state):
            hvd.load_model(args.evaluate, model, share=True)
            found = evaluate()
            hvd.report(**found)
            if hvd.rank() == 0:
                print(
                    f"top-1 accuracy {found['top1']:.4f}, top-5 {found['top5']:.4f}, loss "
                    f"{found['validation_loss']:.4f} on {len(held_out)} pictures"
                )

        measure(hvd.State(model=model))
        return

    optimizer = hvd.DistributedOptimizer(make_optimizer(args, model), model)
    rate = rate_of(args, len(examples) / args.batch_size)
    schedule = hvd.follow_progress(torch.optim.lr_scheduler.LambdaLR(optimizer, rate))
    scaler = hvd.GradScaler(enabled=precision == torch.float16)
    loader = hvd.DataLoader(
        examples,
        args.batch_size,
        shuffle=True,
        max_batch_size=args.max_batch_size,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
    )
    losses = hvd.Accumulator("losses")

    @hvd.run
    def train(state):
        for epoch in hvd.epochs(args.epochs):
            model.train()
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(
                    forward(images).float(),
                    labels.to(device),
                    label_smoothing=args.label_smoothing,
                )
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                losses.add(loss=loss * len(labels), examples=len(labels))
                state.commit(loss=loss)
            losses.synchronize()
            found = evaluate()
            hvd.report(**found)
            if found["top1"] > state.best:
                state.best = found["top1"]
                hvd.save("best.pt", {"model": model.state_dict(), "epoch": epoch, **found})
            if hvd.rank() == 0 and losses:
                loss = losses["loss"] / losses["examples"]
                print(
                    f"pass {epoch}: loss {loss:.3f}, top-1 accuracy {found['top1']:.4f}, "
                    f"top-5 {found['top5']:.4f}",
                    flush=True,
                )
            losses.clear()

    state = hvd.State(model=model, optimizer=optimizer, schedule=schedule, best=-1.0)
    train(state)
    if hvd.rank() == 0:
        print(f"best top-1 accuracy {state.best:.4f} on {len(held_out)} pictures")


if __name__ == "__main__":
    main()
