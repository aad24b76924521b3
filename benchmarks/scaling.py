"""Checks the figures of ``hvd-elastic bench synthetic``; see README.md here.

``ring``: eight virtual hosts with an emulated device and links of 1 Gbit/s, beside plain TCP
transfers of the bytes that a ring sends. ``horovod``: ResNet-50 under Horovod's optimizer in the
loop of its own synthetic benchmark, beside ours, on two hosts, in turn.

Run it: ``python benchmarks/scaling.py --out benchmarks/results/scaling.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step_time import interval
from benchmarks.testbed.command import Say, at_least_one, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.hosts import Testbed, make_testbed
from benchmarks.testbed.launchers import ROOT, STATIC, Order
from benchmarks.testbed.raw_tcp import time_raw_tcp
from hvd_elastic.bench.scaling import Scaling, Settings
from hvd_elastic.bench.synthetic import measure_synthetic
from hvd_elastic.hosts.hostfile import Host

PARTS = ("ring", "horovod")
SIZES = (1, 2, 4, 8)
WIDTH, LAYERS = 512, 8
DEVICE_S = 0.3
RATE = "1gbit"
BATCH, SIDE = 4, 96
WARM, PER_ITERATION, ITERATIONS = 5, 5, 5
LIMIT_S = 400.0


def perceptron(batch_size: int) -> tuple[Any, Callable[[], Any]]:
    """Return a model with 8.4 MB of gradients, which eight ranks on two cores can carry."""
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    inputs = torch.randn(batch_size, WIDTH)
    return model, lambda: model(inputs).square().mean()


def resnet(batch_size: int) -> tuple[Any, Callable[[], Any]]:
    """Return ResNet-50 on small pictures."""
    import torch
    from torch.nn import functional as F

    from hvd_elastic.models.resnet import resnet50

    model = resnet50()
    images, labels = torch.randn(batch_size, 3, SIDE, SIDE), torch.randint(1000, (batch_size,))
    return model, lambda: F.cross_entropy(model(images), labels)


def train_horovod(result: Path) -> None:
    """Time iterations of steps as Horovod's ``pytorch_synthetic_benchmark.py`` does."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(0)
    model, loss = resnet(BATCH)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def steps(number: int) -> float:
        began = time.perf_counter()
        for _ in range(number):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        return time.perf_counter() - began

    steps(WARM)
    rates = [BATCH * PER_ITERATION / steps(PER_ITERATION) for _ in range(ITERATIONS)]
    if hvd.rank() == 0:
        result.write_text(json.dumps(sum(rates) / len(rates) * hvd.size()))
        hvd.barrier()
    else:
        hvd.barrier()


# -- the measurement -------------------------------------------------------------------------


def _ours(bed: Testbed, sizes: Sequence[int], settings: Settings, seconds: float) -> Scaling:
    hostfile = bed.scratch / "scaling-hosts"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in bed.hosts))
    hosts = [Host(name) for name in bed.hosts]
    options = ["--ssh-config", str(bed.cluster.ssh_config)]
    return measure_synthetic(hostfile, hosts, sizes, settings, seconds, options, lambda _: None)


def measure_ring(say: Say, seconds: float) -> list[dict[str, Any]]:
    """Return the row of eight hosts with an emulated device."""
    with make_testbed(SIZES[-1], rate=RATE) as bed:
        device = Settings(model="benchmarks.scaling:perceptron", emulated=(DEVICE_S, 0.0))
        found = _ours(bed, SIZES, device, seconds)
        ranks = SIZES[-1]
        sent = round(4 * found.parameters * 2 * (ranks - 1) / ranks)
        ring_s = median(time_raw_tcp(bed.cluster, bed.hosts, sent) for _ in range(3))
    last = found.sizes[-1]
    # Most of the ring can be hidden behind the backward pass, two thirds of the device's time.
    alone_s = found.sizes[0].step_s
    allowed = alone_s / max(alone_s, ring_s)
    assert found.check is not None
    row = {
        "hosts": last.slots,
        "sent_mb": sent / 1e6,
        "ring_s": ring_s,
        "alone_s": alone_s,
        "step_s": last.step_s,
        "efficiency": last.efficiency,
        "allowed": allowed,
        "of_allowed": last.efficiency / allowed,
        "exposed_s": last.exposed_s,
        "predicted_off": found.check[1] - 1,
    }
    say(f"{ranks} hosts: {row['of_allowed']:.2f} of what plain TCP allows; {found.words}")
    return [row]


def measure_horovod(say: Say, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of ours and of Horovod's loop on two hosts."""
    rates: dict[str, list[float]] = {"horovod": [], "ours": []}
    ours = Settings(model="benchmarks.scaling:resnet", batch_size=BATCH)
    with make_testbed(2) as bed:

        def horovod() -> float:
            result = bed.scratch / "rate.json"
            result.unlink(missing_ok=True)
            training = [str(ROOT / "benchmarks/scaling.py"), "--train-horovod", str(result)]
            order = Order(bed.slots(1, 1), training)
            with bed.job(STATIC, order) as job:
                job.wait(lambda: result.exists() and result.read_text(), LIMIT_S)
            return float(json.loads(result.read_text()))

        ways: dict[str, Callable[[], float]] = {
            "horovod": horovod,
            "ours": lambda: _ours(bed, [2], ours, seconds).sizes[0].throughput,
        }
        for number in range(rounds):
            for way in sorted(ways, reverse=bool(number % 2)):
                rates[way].append(ways[way]())
                say(f"{way}: {rates[way][-1]:.2f} images/s")
    ratios = [mine / theirs for mine, theirs in zip(rates["ours"], rates["horovod"], strict=True)]
    return [
        {"way": "horovod", "images_s": median(rates["horovod"]), "ours_relative": None},
        {
            "way": "ours",
            "images_s": median(rates["ours"]),
            "ours_relative": median(ratios),
            "interval": interval(ratios) if len(ratios) > 1 else None,
        },
    ]


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure the parts that were asked for."""
    check_names("--parts", options.parts, PARTS)
    load_before = os.getloadavg()
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    tables: dict[str, Any] = {}
    if "ring" in options.parts:
        tables["ring"] = measure_ring(say, options.seconds)
    if "horovod" in options.parts:
        tables["horovod"] = measure_horovod(say, options.rounds, options.seconds)
    note = f"A device of {DEVICE_S} s a step is emulated for the ring, with links of {RATE}."
    hosts = f"{SIZES[-1]} and 2 virtual hosts"
    return Result("scaling", conditions(hosts, note, load_before), tables)


def main() -> int:
    """Run the benchmark with its command line; return the exit status."""
    if sys.argv[1:2] == ["--train-horovod"]:
        train_horovod(Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(prog="scaling.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", type=names, default=list(PARTS), help="ring,horovod")
    parser.add_argument("--rounds", type=at_least_one, default=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="time for each size")
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
