"""Checks the figures of ``hvd-elastic bench synthetic``; see README.md here.

``ring``: eight virtual hosts with an emulated device, beside plain TCP transfers of the bytes that
a ring sends, with links of the highest rate at which this machine lets plain TCP use them fully.
``torch`` and ``tensorflow``: ResNet-50 under Horovod's optimizer in the loop of its own synthetic
benchmark, beside ours, on two hosts, in turn.

Run it: ``python benchmarks/scaling.py --out benchmarks/results/scaling.json``.
"""

from __future__ import annotations

import argparse
import importlib
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
from benchmarks.testbed.command import (
    Say,
    at_least_one,
    check_names,
    names,
    numbers,
    run_benchmark,
)
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.hosts import Testbed, make_testbed
from benchmarks.testbed.launchers import ROOT, STATIC, STATIC_TENSORFLOW, Order
from benchmarks.testbed.raw_tcp import time_raw_tcp
from hvd_elastic.bench.scaling import Scaling, Settings
from hvd_elastic.bench.synthetic import measure_synthetic
from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host

PARTS = ("ring", "torch", "tensorflow")
SIZES = (1, 2, 4, 8)
PARAMETERS = 25_557_032
"""Of ResNet-50."""
RING_SHARE = 0.55
"""Time of the ring relative to that of the emulated device: most of it can be hidden behind the
backward pass, which takes two thirds of the device's time."""
RATES = (1000, 800, 600, 500, 400, 300, 200, 100)
"""Rates of links to try [Mbit/s]."""
SUSTAINED = 0.9
"""Least share of a link that plain TCP has to use, headers included."""
WIRE = 1514 / 1448
"""Bytes of a full packet for each byte of its content."""
BATCH, SIDE, CLASSES = 4, 96, 1000
WARM, PER_ITERATION, ITERATIONS = 5, 5, 5
LIMIT_S = 400.0
THREADS = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}


def resnet(batch_size: int) -> tuple[Any, Callable[[], Any]]:
    """Return ResNet-50 on small pictures."""
    import torch
    from torch.nn import functional as F

    from hvd_elastic.bench.models import resnet50

    model = resnet50()
    images, labels = torch.randn(batch_size, 3, SIDE, SIDE), torch.randint(CLASSES, (batch_size,))
    return model, lambda: F.cross_entropy(model(images), labels)


def keras_resnet(batch_size: int) -> tuple[Any, Callable[[], Any]]:
    """Return ResNet-50 of Keras on small pictures."""
    import keras
    import tensorflow as tf

    model = keras.applications.ResNet50(weights=None, input_shape=(SIDE, SIDE, 3), classes=CLASSES)
    images = tf.random.normal((batch_size, SIDE, SIDE, 3))
    labels = tf.random.uniform((batch_size,), maxval=CLASSES, dtype=tf.int32)
    crossentropy = keras.losses.SparseCategoricalCrossentropy()
    return model, lambda: crossentropy(labels, model(images, training=True))


MODELS = {"torch": "resnet", "tensorflow": "keras_resnet"}


def torch_step(hvd: Any) -> Callable[[], object]:
    """Return a step as in Horovod's ``pytorch_synthetic_benchmark.py``."""
    import torch

    torch.manual_seed(0)
    model, loss = resnet(BATCH)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def tensorflow_step(hvd: Any) -> Callable[[], object]:
    """Return a step as in Horovod's ``tensorflow2_synthetic_benchmark.py``."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model, loss = keras_resnet(BATCH)
    optimizer = keras.optimizers.SGD(1e-4, momentum=0.9)
    optimizer.build(model.trainable_variables)
    # Horovod does not know the variables of Keras 3, which hold those of TensorFlow.
    trained = [each.value for each in model.trainable_variables]
    hvd.broadcast_variables([each.value for each in model.variables], root_rank=0)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        gradients = hvd.DistributedGradientTape(tape).gradient(value, trained)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    return lambda: step().numpy()


def train_horovod(framework: str, result: Path) -> None:
    """Time iterations of steps as Horovod's synthetic benchmarks do."""
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    step = {"torch": torch_step, "tensorflow": tensorflow_step}[framework](hvd)

    def steps(number: int) -> float:
        began = time.perf_counter()
        for _ in range(number):
            step()
        return time.perf_counter() - began

    steps(WARM)
    rates = [BATCH * PER_ITERATION / steps(PER_ITERATION) for _ in range(ITERATIONS)]
    if hvd.rank() == 0:
        result.write_text(json.dumps(sum(rates) / len(rates) * hvd.size()))
    hvd.shutdown()


# -- the measurement -------------------------------------------------------------------------


class Lines:
    """Shows progress as lines; see :class:`hvd_elastic.bench.synthetic.Progress`."""

    def __init__(self, say: Say) -> None:
        self.say = say

    def measured(self, slots: int, per_s: float, noise: float | None) -> None:
        """Show the throughput of a size."""
        if noise is not None:
            self.say(f"{slots} slots: {per_s:.1f} examples/s")


def _ours(
    bed: Testbed, sizes: Sequence[int], settings: Settings, seconds: float, say: Say
) -> Scaling:
    hostfile = bed.scratch / "scaling-hosts"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in bed.hosts))
    hosts = [Host(name) for name in bed.hosts]
    options = ["--ssh-config", str(bed.cluster.ssh_config)]
    return measure_synthetic(hostfile, hosts, sizes, settings, seconds, options, Lines(say))


def _time_ring(bed: Testbed, sent: int) -> float:
    """Return the time in which every host sends so many bytes to the next by plain TCP [s]."""
    around = [*bed.hosts, bed.hosts[0]]
    return median(time_raw_tcp(bed.cluster, around, sent) for _ in range(3))


def measure_ring(say: Say, rates: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Return the row of eight hosts with an emulated device, at the first rate that is sustained.

    Raises:
        RunError: none is.
    """
    ranks = SIZES[-1]
    sent = round(4 * PARAMETERS * 2 * (ranks - 1) / ranks)
    for mbit in rates:
        with make_testbed(ranks, rate=f"{mbit}mbit") as bed:
            ring_s = _time_ring(bed, sent)
            used = 8e-6 * WIRE * sent / mbit / ring_s
            say(f"{mbit} Mbit/s: plain TCP uses {100 * used:.0f} % of the links")
            if used < SUSTAINED:
                continue
            device = Settings(emulated=(round(ring_s / RING_SHARE, 1), 0.0))
            found = _ours(bed, SIZES, device, seconds, say)
            ring_s = max(ring_s, _time_ring(bed, sent))
            return [_ring_row(found, mbit, sent, ring_s, say)]
    raise RunError(f"plain TCP uses less than {SUSTAINED:.0%} of the links at all of {rates}")


def _ring_row(found: Scaling, mbit: int, sent: int, ring_s: float, say: Say) -> dict[str, Any]:
    last = found.sizes[-1]
    # As if the whole ring could be hidden, though its last bytes are known when the passes end.
    alone_s = found.sizes[0].step_s
    allowed = alone_s / max(alone_s, ring_s)
    assert found.check is not None
    row = {
        "hosts": last.slots,
        "link_mbit": mbit,
        "sent_mb": sent / 1e6,
        "ring_s": ring_s,
        "link_used": 8e-6 * WIRE * sent / mbit / ring_s,
        "alone_s": alone_s,
        "step_s": last.step_s,
        "efficiency": last.efficiency,
        "allowed": allowed,
        "of_allowed": last.efficiency / allowed,
        "compute_s": last.compute_s,
        "exposed_s": last.exposed_s,
        "rest_s": last.rest_s,
        "predicted_off": found.check[1] - 1,
        "words": found.words,
    }
    say(f"{last.slots} hosts: {row['of_allowed']:.3f} of what plain TCP allows; {found.words}")
    return row


def measure_horovod(framework: str, say: Say, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of ours and of Horovod's loop on two hosts."""
    rates: dict[str, list[float]] = {"horovod": [], "ours": []}
    model = f"benchmarks.scaling:{MODELS[framework]}"
    ours = Settings(framework, model, batch_size=BATCH)
    with make_testbed(2) as bed:

        def horovod() -> float:
            result = bed.scratch / "rate.json"
            result.unlink(missing_ok=True)
            training = [str(ROOT / "benchmarks/scaling.py"), "--train-horovod", framework]
            order = Order(bed.slots(1, 1), [*training, str(result)], environment=THREADS)
            launcher = STATIC if framework == "torch" else STATIC_TENSORFLOW
            with launcher.job(bed, order) as job:
                job.wait(lambda: result.exists() and result.read_text(), LIMIT_S)
            return float(json.loads(result.read_text()))

        ways: dict[str, Callable[[], float]] = {
            "horovod": horovod,
            "ours": lambda: _ours(bed, [2], ours, seconds, lambda _: None).sizes[0].throughput,
        }
        for number in range(rounds):
            for way in sorted(ways, reverse=bool(number % 2)):
                rates[way].append(ways[way]())
                say(f"{framework}, {way}: {rates[way][-1]:.2f} images/s")
    ratios = [mine / theirs for mine, theirs in zip(rates["ours"], rates["horovod"], strict=True)]
    return [
        {
            "framework": framework,
            "images_s": median(rates["ours"]),
            "horovod_images_s": median(rates["horovod"]),
            "ours_relative": median(ratios),
            "interval": interval(ratios) if len(ratios) > 1 else None,
        }
    ]


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure the parts that were asked for."""
    check_names("--parts", options.parts, PARTS)
    load_before = os.getloadavg()
    os.environ.update(THREADS, PYTHONPATH=str(ROOT))
    tables: dict[str, Any] = {}
    if "ring" in options.parts:
        tables["ring"] = measure_ring(say, options.rates, options.seconds)
    for framework in MODELS:
        if framework in options.parts:
            tables[framework] = measure_horovod(framework, say, options.rounds, options.seconds)
    note = "For the ring a device is emulated whose passes take as long as alone_s."
    hosts = f"{SIZES[-1]} and 2 virtual hosts"
    return Result("scaling", conditions(hosts, note, load_before), tables)


def main() -> int:
    """Run the benchmark with its command line; return the exit status."""
    if sys.argv[1:2] == ["--train-horovod"]:
        train_horovod(sys.argv[2], Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(prog="scaling.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", type=names, default=list(PARTS), help="ring,torch,tensorflow")
    parser.add_argument("--rates", type=numbers, default=list(RATES), help="of links [Mbit/s]")
    parser.add_argument("--rounds", type=at_least_one, default=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="time for each size")
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
