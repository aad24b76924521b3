"""The best classes of every picture of a folder of shards, with the ResNet of imagenet.py.

    hvd-elastic predict -H hosts --checkpoint resnet --data /data/imagenet/val --out outputs \
        -- python scripts/examples/imagenet_predict.py --classes 1000
"""

import argparse

from imagenet import STAGES, CentreCrop, ResNet, ShardDataset, hvd, to_tensor, torch

parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
parser.add_argument("--classes", type=int, default=1000)
parser.add_argument("--depth", type=int, choices=STAGES, default=50, help="of the ResNet")
parser.add_argument("--width", type=int, default=64, help="channels that the ResNet begins with")
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
parser.add_argument("--workers", type=int, default=4, help="processes of a rank that decode")
args = parser.parse_args()

hvd.init()
device = hvd.device()
model = ResNet(args.depth, args.width, args.classes).to(device)
mean, deviation = (
    torch.tensor(values, device=device).view(3, 1, 1)
    for values in ((123.7, 116.3, 103.5), (58.4, 57.1, 57.4))
)


def forward(batch):
    pictures, labels = batch
    best = model((pictures.float() - mean) / deviation).softmax(1).topk(min(5, args.classes))
    return {"classes": best.indices, "shares": best.values, "labels": labels}


hvd.predict(
    model,
    lambda folder: ShardDataset(folder, to_tensor, decode=CentreCrop(args.image_size)),
    forward=forward,
    batch_size=args.batch_size,
    num_workers=args.workers,
)
