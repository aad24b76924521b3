"""Measures rings that meet once a period on slow links, and what they learn; see README.md here.

``links``: two virtual hosts with links of each rate; a model of 4 MB whose steps are padded to 50
ms. Synchronous training, DiLoCo of ours and of torchft with periods of ten transfers, ours in 16
bits, and ours with periods of one transfer, which measures how long that takes. ``loss``: a small
transformer learns characters on two ranks, with DiLoCo and synchronously, from the same examples.

Run it: ``python benchmarks/local_steps.py --out benchmarks/results/local_steps.json``, 8 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.command import Say, at_least_one, check_names, names, numbers, run_benchmark
from benchmarks.testbed.environments import PeerMissingError
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.hosts import Testbed, make_testbed
from benchmarks.testbed.launchers import OURS, ROOT, TORCHFT, FailedPlayError, Order

PARTS = ("links", "loss")
RATES = (1000, 100, 10)
"""Of links [Mbit/s]."""
WIDTH, LAYERS = 512, 4
BYTES = 4 * LAYERS * WIDTH * WIDTH
STEP_S = 0.05
"""Time of a step without what is sent [s]."""
TRANSFERS = 10
"""Transfers that a period is long."""
SHARE = 0.9
"""Wanted share of the throughput without any link."""
WIRE = 1514 / 1448
"""Bytes of a full packet for each byte of its content."""
MEASURED_S = 10.0
"""Least time that is measured of a way [s]."""
LIMIT_S = 300.0
THREADS = {"OMP_NUM_THREADS": "1"}


# -- training, on a host -----------------------------------------------------------------------


class Marks:
    """Time and bytes sent so far, at the beginning and after each period.

    Args:
        result: file that is written when all are there.
        count: number of periods.
    """

    def __init__(self, result: Path, count: int) -> None:
        self._result, self._count = result, count
        self._found: list[tuple[float, int]] = []

    def add(self) -> None:
        """Add one for now."""
        (line,) = (
            each for each in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in each
        )
        sent = int(line.partition(":")[2].split()[8])
        self._found.append((time.monotonic(), sent))
        if len(self._found) == self._count + 1:
            partial = Path(f"{self._result}.partial")  # process ids are alike on virtual hosts
            partial.write_text(json.dumps(self._found))
            partial.replace(self._result)


def _network() -> Any:
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers)


def _optimizers(model: Any) -> tuple[Any, Any]:
    import torch

    inner = torch.optim.AdamW(model.parameters(), 1e-4)
    return inner, torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)


def _compute(model: Any, inputs: Any) -> None:
    """Compute gradients in about ``STEP_S``, two thirds of it after they begin to be there."""
    time.sleep(STEP_S / 3)
    model(inputs).square().mean().backward()
    time.sleep(STEP_S * 2 / 3)


def train_ours(way: str, every: int, periods: int, result: Path) -> None:
    """Train synchronously, with DiLoCo, or with DiLoCo in 16 bits."""
    import torch
    from torch.utils.data import TensorDataset

    import hvd_elastic.torch as hvd

    hvd.init()
    model = _network()
    inner, outer = _optimizers(model)
    if way == "synchronous":
        optimizer = hvd.DistributedOptimizer(inner, model)
    else:
        kind = hvd.Compression.bf16 if way == "bf16" else hvd.Compression.none
        optimizer = hvd.LocalOptimizer(inner, model, every=every, outer=outer, compression=kind)
    data = TensorDataset(torch.randn(64, WIDTH))
    loader: hvd.DataLoader[Any] = hvd.DataLoader(data, 4, shuffle=True)

    @hvd.run
    def train(_: Any) -> None:
        marks = Marks(result if hvd.rank() == 0 else result.with_suffix(".other"), periods)
        marks.add()
        for number, (inputs,) in enumerate(hvd.steps(every * periods, loader), 1):
            optimizer.zero_grad()
            _compute(model, inputs)
            optimizer.step()
            if number % every == 0:
                marks.add()

    train(hvd.State(model=model, optimizer=optimizer))


def train_torchft(every: int, periods: int, result: Path) -> None:
    """Train with torchft's DiLoCo; its replicas start apart, so a first period is not measured."""
    import torch
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    model = _network()
    inner, outer = _optimizers(model)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
    )
    marks = Marks(result, periods)
    with DiLoCo(manager, [model], inner, outer, sync_every=every):
        for number in range(1, every * (periods + 1) + 1):
            inner.zero_grad()
            _compute(model, torch.randn(2, WIDTH))
            inner.step()
            if number % every == 0:
                marks.add()
    time.sleep(STEP_S)


def train_characters(way: str, seed: int, every: int, steps: int, result: Path) -> None:
    """Learn the characters of Python's standard library; write the loss of other text."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    import hvd_elastic.torch as hvd
    from hvd_elastic.bench.models import GPT2

    hvd.init()
    torch.manual_seed(seed)
    context, batch = 32, 32
    text = b"".join(
        path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    )
    codes = torch.frombuffer(bytearray(text[: 33 * 40_000]), dtype=torch.uint8).long().view(-1, 33)
    model = GPT2(vocabulary=256, context=context, layers=2, heads=4, width=64)
    inner = torch.optim.AdamW(model.parameters(), 2e-3)
    if way == "synchronous":
        optimizer = hvd.DistributedOptimizer(inner, model)
    else:
        # The paper's momentum of 0.9 is for longer periods, and many of them.
        outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.5, nesterov=True)
        optimizer = hvd.LocalOptimizer(inner, model, every=every, outer=outer)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * max(0.1, 1 - step / steps)
    )
    held_out, training = codes[::20], codes[torch.arange(len(codes)) % 20 > 0]
    loader: hvd.DataLoader[Any] = hvd.DataLoader(
        TensorDataset(training), batch, shuffle=True, seed=seed
    )

    @hvd.run
    def train(_: Any) -> None:
        for (rows,) in hvd.steps(steps, loader):
            optimizer.zero_grad()
            F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()
            schedule.step()
        if hvd.rank() == 0:
            with torch.no_grad():
                scores = model(held_out[:, :-1]).flatten(0, 1)
                loss = F.cross_entropy(scores, held_out[:, 1:].flatten()).item()
            result.write_text(json.dumps(loss))

    train(hvd.State(model=model, optimizer=optimizer, schedule=schedule))


# -- the measurement ---------------------------------------------------------------------------


def _result_of(bed: Testbed, kind: str, *arguments: object) -> Any:
    """Run a training on two hosts, and return what it writes."""
    result = bed.scratch / f"result-{time.monotonic_ns()}.json"
    script = [str(ROOT / "benchmarks/local_steps.py"), "--train", kind]
    order = Order(
        bed.slots(1, 1),
        [*script, *map(str, arguments), str(result)],
        min_np=2,
        options=("--checkpoint-every", "0"),
        environment=THREADS,
    )
    launcher = TORCHFT if kind == "torchft" else OURS
    with launcher.job(bed, order) as job:
        found = job.wait(lambda: result.exists() and result.read_text(), LIMIT_S)
    return json.loads(str(found))


def transfer_s(mbit: int) -> float:
    """Return the time in which a ring of two sends the differences of all parameters [s].

    >>> round(transfer_s(100), 3)
    0.351
    """
    return BYTES * WIRE * 8e-6 / mbit


def smallest_period(sent_s: float, step_s: float) -> int:
    """Return the least number of steps that a period needs for ``SHARE`` of the throughput.

    Args:
        sent_s: time of a transfer [s].
        step_s: time of a step without it [s].

    >>> smallest_period(4.0, 1.0)
    36
    """
    return math.ceil(round(sent_s / step_s * SHARE / (1 - SHARE), 6))


def _ways(mbit: int | None, peers: bool) -> Iterator[tuple[str, int, int]]:
    """Yield the ways to train with a link, each with its period and the number of periods."""
    every = TRANSFERS if mbit is None else math.ceil(TRANSFERS * transfer_s(mbit) / STEP_S)
    sent_s = 0.0 if mbit is None else transfer_s(mbit)
    periods = max(2, math.ceil(MEASURED_S / (every * STEP_S + sent_s)))
    yield "diloco", every, periods
    if mbit is not None:
        short = math.ceil(sent_s / STEP_S)
        yield "short", short, max(4, math.ceil(MEASURED_S / (short * STEP_S + sent_s)))
    yield "synchronous", 1, max(4, math.ceil(MEASURED_S / 2 / (STEP_S + sent_s)))
    if mbit == 100:
        yield "bf16", every, periods
    if peers and mbit is not None:
        yield "torchft", every, periods - (periods == 2)


def measure_links(say: Say, rates: Sequence[int], peers: bool) -> list[dict[str, Any]]:
    """Return a row for each link and way."""
    shares: list[Path] = []
    if peers:
        try:
            shares = TORCHFT.prepare()
        except PeerMissingError as error:
            say(f"torchft: {error}")
            peers = False
    rows: list[dict[str, Any]] = []
    alone_s = STEP_S
    for mbit in (None, *rates):
        with make_testbed(2, rate=f"{mbit}mbit" if mbit else None, shares=shares) as bed:
            for way, every, periods in _ways(mbit, peers):
                arguments = (every, periods) if way == "torchft" else (way, every, periods)
                try:
                    marks = _result_of(bed, "torchft" if way == "torchft" else "ours", *arguments)
                except FailedPlayError as error:
                    rows.append({"link_mbit": mbit, "way": way, "every": every, "why": error.short})
                    say(f"{mbit} Mbit/s, {way}: {error}")
                    continue
                if mbit is None and way == "diloco":
                    alone_s = median(later[0] - one[0] for one, later in pairwise(marks)) / every
                rows.append(_row(mbit, way, every, marks, alone_s))
                say(f"{rows[-1]}")
    return rows


def _row(
    mbit: int | None, way: str, every: int, marks: list[tuple[float, int]], alone_s: float
) -> dict[str, Any]:
    period_s = median(later[0] - one[0] for one, later in pairwise(marks))
    sent = (marks[-1][1] - marks[0][1]) / (len(marks) - 1)
    taken_s = max(0.0, period_s - every * alone_s)
    row: dict[str, Any] = {
        "link_mbit": mbit,
        "way": way,
        "every": every,
        "step_s": period_s / every,
        "of_no_link": every * alone_s / period_s,
        "sent_mb": sent / 1e6,
        "computed_mb": BYTES / (2 if way == "bf16" else 1) * WIRE / 1e6,
    }
    if mbit is not None and way == "short":
        computed_s = transfer_s(mbit)
        row |= {
            "transfer_s": taken_s,
            "computed_s": computed_s,
            "smallest_every": smallest_period(taken_s, STEP_S),
            "computed_every": smallest_period(computed_s, STEP_S),
        }
    return row


def measure_loss(say: Say, seeds: int, steps: int, every: int) -> list[dict[str, Any]]:
    """Return a row for each way: the loss of text that was not learnt, over the seeds."""
    found: dict[str, list[float]] = {"synchronous": [], "diloco": []}
    with make_testbed(2) as bed:
        for seed in range(seeds):
            for way, losses in found.items():
                losses.append(_result_of(bed, "characters", way, seed, every, steps))
                say(f"seed {seed}, {way}: loss {losses[-1]:.4f}")
    base = mean(found["synchronous"])
    return [
        {
            "way": way,
            "steps": steps,
            "every": 1 if way == "synchronous" else every,
            "loss": mean(losses),
            "lowest": min(losses),
            "highest": max(losses),
            "of_synchronous": mean(losses) / base,
        }
        for way, losses in found.items()
    ]


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure the parts that were asked for."""
    check_names("--parts", options.parts, PARTS)
    load_before = os.getloadavg()
    os.environ.update(THREADS, PYTHONPATH=str(ROOT))
    tables: dict[str, Any] = {}
    if "links" in options.parts:
        tables["links"] = measure_links(say, options.rates, not options.no_peers)
    if "loss" in options.parts:
        tables["loss"] = measure_loss(say, options.seeds, options.steps, options.every)
    note = f"A step without a link takes {STEP_S} s, most of it asleep."
    return Result("local_steps", conditions("2 virtual hosts", note, load_before), tables)


TRAIN: dict[str, Callable[..., None]] = {
    "ours": train_ours,
    "torchft": train_torchft,
    "characters": train_characters,
}


def main() -> int:
    """Run the benchmark with its command line; return the exit status."""
    if sys.argv[1:2] == ["--train"]:
        *arguments, result = sys.argv[3:]
        given = [int(each) if each.isdigit() else each for each in arguments]
        TRAIN[sys.argv[2]](*given, Path(result))
        return 0
    parser = argparse.ArgumentParser(prog="local_steps.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", type=names, default=["links"], help="links,loss")
    parser.add_argument("--rates", type=numbers, default=list(RATES), help="of links [Mbit/s]")
    parser.add_argument("--no-peers", action="store_true", help="leave torchft out")
    parser.add_argument("--seeds", type=at_least_one, default=5)
    parser.add_argument("--steps", type=at_least_one, default=1500, help="for the loss")
    parser.add_argument("--every", type=at_least_one, default=10, help="period for the loss")
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
