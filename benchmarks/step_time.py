"""Measures the time of a training step beside DDP and Horovod's optimizer; see README.md here.

Run it: ``python benchmarks/step_time.py --out step_time.json``. Each round
starts every launcher once for each row, so a disturbance of the machine meets all. A row's figure
is the median over the rounds of ours / DDP, where each is the median step of its job. With
``--in-turn`` one job trains with ours and DDP in turn, in blocks of steps, and a round is a block
of each: a disturbance of the machine meets both alike. With ``--trace`` one job of ours for each
row tells what its steps consist of. With ``--loop lightning`` Lightning's Trainer trains, and
beside ours it does so with its DDP strategy, or alone on one rank (``--ranks 1``).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.command import Say, at_least_one, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.hosts import Testbed, make_testbed
from benchmarks.testbed.launchers import OURS, STATIC, TORCHRUN, Job, Launcher, Order
from benchmarks.testbed.marks import Process, Step
from benchmarks.testbed.tracing import PARTS
from hvd_elastic.errors import UsageError

if TYPE_CHECKING:
    import torch

RANKS = 2
WARM_STEPS = 15
BLOCK = 10
"""Steps of a block with ``--in-turn``."""
WARM_BLOCKS = 4
START_LIMIT_S = 300.0
LOOPS = {"plain": "", "lightning": "Lightning's", "transformers": "Hugging Face's"}
"""What trains, and whose Trainer it is."""
LAUNCHERS = {"ddp": TORCHRUN, "horovod": STATIC, "ours": OURS}


@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        described: description for the table.
        build: creates the network.
        example: shape of an example.
        share: examples of one rank in a step.
        steps: steps that are timed in one job.
    """

    described: str
    build: Callable[[], torch.nn.Module]
    example: tuple[int, ...]
    share: int
    steps: int


@dataclass(frozen=True)
class Variant:
    """An option of our training that a step may cost something for."""

    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


VARIANTS = {
    "plain": Variant(),
    "adaptive": Variant(arguments=("--adaptive",)),
    "bf16": Variant(arguments=("--compression", "bf16")),
    "audit": Variant(options=("--audit",)),
    "checkpoints": Variant(options=("--checkpoint-every", "1")),
}


def _convolutions() -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def _many_tensors() -> torch.nn.Module:
    from torch import nn

    layers = [each for _ in range(60) for each in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers)


def _wide() -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(
        *(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()),
        nn.Linear(4096, 1024),
    )


def _transformer() -> torch.nn.Module:
    from torch import nn

    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


MODELS = {
    "small": Model(
        "2 convolutions, 1.2 M parameters in 8 tensors", _convolutions, (1, 28, 28), 32, 150
    ),
    "tensors": Model("60 layers of 256, 4 M in 120 tensors", _many_tensors, (256,), 64, 100),
    "wide": Model("MLP, 25 M (100 MB) in 6 tensors", _wide, (1024,), 32, 30),
    "transformer": Model(
        "transformer of 4 layers, 3 M in 48 tensors", _transformer, (32, 256), 8, 60
    ),
}


# -- the training script, in a worker --------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Train in one worker until it is killed."""
    import torch
    from torch.utils.data import TensorDataset

    chosen = MODELS[args.model]
    torch.manual_seed(0)
    model = chosen.build()
    examples = TensorDataset(torch.randn(chosen.share * RANKS * 64, *chosen.example))
    sgd: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    if args.loop != "plain":
        if args.launcher != "ours":
            sgd.world_size = lambda: args.ranks  # read by the marks
        trainers = {"lightning": _train_lightning, "transformers": _train_transformers}
        trainers[args.loop](args, model, sgd, examples, chosen.share)
        return
    how = {"ddp": _train_ddp, "horovod": _train_horovod, "ours": _train_ours}[args.launcher]
    how(args, model, sgd, examples, chosen.share)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def _sampled(examples: Any, share: int, rank: int) -> Any:
    """Yield batches of PyTorch's loader without end, as a script for DDP or Horovod reads them."""
    from torch.utils.data import DataLoader, DistributedSampler

    sampler: Any = DistributedSampler(examples, RANKS, rank)
    loader = DataLoader(examples, share, sampler=sampler)
    for epoch in range(sys.maxsize):
        sampler.set_epoch(epoch)
        yield from loader


def _train_ddp(_: Any, model: Any, sgd: Any, examples: Any, share: int) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    sgd.world_size = dist.get_world_size  # read by the marks
    replicated = DistributedDataParallel(model)
    for (inputs,) in _sampled(examples, share, dist.get_rank()):
        _step(replicated, sgd, inputs)


def _train_horovod(_: Any, model: Any, sgd: Any, examples: Any, share: int) -> None:
    import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for (inputs,) in _sampled(examples, share, hvd.rank()):
        _step(model, optimizer, inputs)


def _train_lightning(args: Any, model: Any, sgd: Any, examples: Any, share: int) -> None:
    import lightning as L
    from torch.utils.data import DataLoader

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return sgd

    nodes, strategy = args.ranks, "ddp" if args.ranks > 1 else "auto"
    if args.launcher == "ours":
        from hvd_elastic.lightning import ElasticStrategy

        nodes, strategy = 1, ElasticStrategy(as_on=args.ranks)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(
        max_epochs=sys.maxsize,
        accelerator="cpu",
        devices=1,
        num_nodes=nodes,
        strategy=strategy,
        **quiet,
    )
    trainer.fit(Module(), DataLoader(examples, share, shuffle=True))


def _train_transformers(args: Any, model: Any, sgd: Any, examples: Any, share: int) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, inputs: Any) -> Any:
            return {"loss": self.net(inputs).square().mean()}

    options = {}
    if args.launcher == "ours":
        from hvd_elastic.transformers import Trainer

        options = {"as_on": args.ranks}
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=10_000,
        per_device_train_batch_size=share,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
    )
    trainer = Trainer(
        model=Module(),
        args=arguments,
        train_dataset=examples,
        data_collator=lambda rows: {"inputs": torch.stack([each for (each,) in rows])},
        optimizers=(sgd, None),
        **options,
    )
    trainer.train()


def _train_ours(args: Any, model: Any, sgd: Any, examples: Any, share: int) -> None:
    import hvd_elastic.torch as hvd

    hvd.init()
    batch = share * RANKS
    steps = itertools.count(1 - args.settle)
    compression = hvd.Compression[args.compression]
    optimizer = hvd.DistributedOptimizer(sgd, model, compression=compression)
    largest = batch if args.adaptive else None
    loader: Any = hvd.DataLoader(examples, batch, shuffle=True, max_batch_size=largest)

    @hvd.run
    def loop(state: hvd.State) -> None:
        train_block = _ddp_blocks(args, examples, hvd.rank()) if args.in_turn else None
        for _ in hvd.epochs(sys.maxsize):
            for (inputs,) in loader:
                state.commit(loss=_step(model, optimizer, inputs))
                step = next(steps)
                if train_block is not None and step > 0 and step % BLOCK == 0:
                    train_block()

    loop(hvd.State(model=model, optimizer=optimizer))


def _ddp_blocks(args: Any, examples: Any, rank: int) -> Callable[[], None]:
    """Return a function that trains another model with DDP for a block of steps."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    chosen = MODELS[args.model]
    # All hosts see the folder of the job.
    dist.init_process_group("gloo", f"file://{Path.cwd()}/ddp", rank=rank, world_size=RANKS)
    model = DistributedDataParallel(chosen.build())
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches = _sampled(examples, chosen.share, rank)

    def train_block() -> None:
        for (inputs,) in itertools.islice(batches, BLOCK):
            _step(model, sgd, inputs)

    return train_block


# -- the measurement -------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Cost of a step of a job, of the rank whose steps take longest.

    Attributes:
        step_s: median time [s].
        cpu_s: mean processor time of the rank [s]; what exceeds it in the step is waiting.
        switches: mean number of context switches of the rank.
    """

    step_s: float
    cpu_s: float
    switches: float

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Cost:
        """Return the cost of the steps after the first.

        >>> Cost.of([Step(1.0, 2, 5.0, 10), Step(1.5, 2, 5.4, 40), Step(2.0, 2, 6.0, 70)])
        Cost(step_s=0.5, cpu_s=0.5, switches=30.0)
        """
        first, last, count = steps[0], steps[-1], len(steps) - 1
        return cls(
            statistics.median(later.mono - earlier.mono for earlier, later in pairwise(steps)),
            (last.cpu - first.cpu) / count,
            (last.switches - first.switches) / count,
        )


def step_cost(
    bed: Testbed, launcher: Launcher, name: str, variant: Variant, loop: str, ranks: int
) -> Cost:
    """Start a job and return the cost of its steps.

    Raises:
        FailedPlayError: the job ended, or took too long.
    """
    key = next(key for key, each in LAUNCHERS.items() if each is launcher)
    script = [__file__, "--train", "--launcher", key, "--model", name]
    script += ["--loop", loop, "--ranks", str(ranks)]
    order = Order(
        slots=dict.fromkeys(bed.hosts[:ranks], 1),
        training=[*script, *(variant.arguments if launcher is OURS else ())],
        min_np=ranks,
        options=variant.options if launcher is OURS else (),
    )
    wanted = WARM_STEPS + MODELS[name].steps

    def ranks_are_done(job: Job) -> bool:
        done = [process for process in job.marks.processes if len(process.steps) > wanted]
        return len(done) == ranks

    with launcher.job(bed, order) as job:
        job.wait(lambda: ranks_are_done(job), START_LIMIT_S)
        costs = [Cost.of(each.steps[WARM_STEPS : wanted + 1]) for each in job.marks.processes]
        return max(costs, key=lambda cost: cost.step_s)


def costs_in_turn(
    bed: Testbed, name: str, variant: Variant, rounds: int, settle: int
) -> tuple[list[Cost], list[Cost]]:
    """Start a job that trains with ours and DDP in turn; return the costs of each one's blocks.

    Args:
        bed: the hosts.
        name: name of the model.
        variant: option of ours.
        rounds: number of blocks of each.
        settle: steps that ours takes before the first block.

    Raises:
        FailedPlayError: the job ended, or took too long.
    """
    script = [__file__, "--train", "--launcher", "ours", "--model", name, "--in-turn"]
    script += ["--settle", str(settle)]
    order = Order(
        slots=dict.fromkeys(bed.hosts[:RANKS], 1),
        training=[*script, *variant.arguments],
        min_np=RANKS,
        options=variant.options,
        environment={"GLOO_SOCKET_IFNAME": "eth0"},  # the only interface to the other host
    )
    blocks = 2 * rounds + WARM_BLOCKS

    def ranks_are_done(job: Job) -> bool:
        wanted = settle + blocks * BLOCK
        return len([each for each in job.marks.processes if len(each.steps) >= wanted]) == RANKS

    with OURS.job(bed, order) as job:
        job.wait(lambda: ranks_are_done(job), START_LIMIT_S)
        ranks = [each.steps[settle:] for each in job.marks.processes]
        found = in_blocks(ranks, blocks)[WARM_BLOCKS:]
        return found[::2], found[1::2]


def in_blocks(ranks: Sequence[Sequence[Step]], blocks: int) -> list[Cost]:
    """Return the cost of each block of steps, of the rank whose steps take longest in it.

    >>> steps = [Step(float(second), 2) for second in range(2 * BLOCK)]
    >>> [cost.step_s for cost in in_blocks([steps, steps], 2)]
    [1.0, 1.0]
    """
    spans = [slice(first, first + BLOCK) for first in range(0, blocks * BLOCK, BLOCK)]
    by_block = [[Cost.of(steps[span]) for steps in ranks] for span in spans]
    return [max(costs, key=lambda cost: cost.step_s) for costs in by_block]


def parts_of_steps(bed: Testbed, name: str, variant: Variant) -> dict[str, float]:
    """Start a job of ours and return the parts of its steps [s], of the rank that waits least.

    They are means over the half of the steps that is nearest to the median, so they add up to about
    a median step.

    Raises:
        FailedPlayError: the job ended, or took too long.
    """
    order = Order(
        slots=dict.fromkeys(bed.hosts[:RANKS], 1),
        training=[__file__, "--train", "--launcher", "ours", "--model", name, *variant.arguments],
        min_np=RANKS,
        options=variant.options,
        environment={"HVD_ELASTIC_BENCH_TRACE": "steps"},
    )
    wanted = WARM_STEPS + MODELS[name].steps

    def ranks_are_done(job: Job) -> bool:
        return len([each for each in job.marks.processes if len(each.parts) >= wanted]) == RANKS

    def middle(process: Process) -> dict[str, float]:
        ordered = sorted(process.parts[WARM_STEPS:wanted], key=lambda parts: sum(parts.values()))
        kept = ordered[len(ordered) // 4 : -(len(ordered) // 4)]
        return {part: statistics.mean(each.get(part, 0.0) for each in kept) for part in PARTS}

    with OURS.job(bed, order) as job:
        job.wait(lambda: ranks_are_done(job), START_LIMIT_S)
        return min(map(middle, job.marks.processes), key=lambda parts: parts["waiting"])


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, from the order statistics.

    >>> interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (1.0, 6.0)
    """
    ordered, count = sorted(samples), len(samples)
    below, tail = 0, 0.5**count
    # Of `count` samples at most `below` lie under the median with a probability of `tail`.
    while below + 1 <= count // 2 and tail + math.comb(count, below + 1) * 0.5**count <= 0.025:
        below += 1
        tail += math.comb(count, below) * 0.5**count
    return ordered[below], ordered[count - 1 - below]


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure all rows, one job of each launcher in every round."""
    check_names("--models", options.models, MODELS)
    check_names("--variants", options.variants, VARIANTS)
    check_names("--peers", options.peers, ("ddp", "horovod"))
    own = options.loop == "plain"
    if own and options.ranks != RANKS:
        raise UsageError("--ranks 1 is for --loop lightning or transformers")
    if not own and ("horovod" in options.peers or options.in_turn or options.trace):
        raise UsageError(f"--loop {options.loop} is for --peers ddp, without --in-turn and --trace")
    for package in ("torch", "horovod", *(() if own else (options.loop,))):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{package} is missing: make {'horovod' if own else 'test-trainers'}")
    load_before = os.getloadavg()
    jobs = [(peer, "plain") for peer in options.peers]
    jobs += [("ours", variant) for variant in options.variants]
    rows: list[dict[str, Any]] = []
    for rate in options.rates:
        with make_testbed(RANKS, rate=None if rate == "none" else rate) as bed:
            for name in options.models:
                if options.trace:
                    rows += _traced(bed, name, rate, options.variants, say)
                    continue
                for variant in options.variants if options.in_turn else ():
                    chosen, rounds = VARIANTS[variant], options.rounds
                    turns = costs_in_turn(bed, name, chosen, rounds, options.settle)
                    pair = dict(zip([("ours", variant), ("ddp", "plain")], turns, strict=True))
                    rows += _rows(name, rate, pair)
                    say(f"{name}, rate {rate}, {variant} / DDP: {rows[-2]['to_ddp']}")
                if options.in_turn:
                    continue
                found: dict[tuple[str, str], list[Cost]] = {job: [] for job in jobs}
                for number in range(1, options.rounds + 1):
                    for job in random.Random(number).sample(jobs, len(jobs)):
                        launcher, variant = LAUNCHERS[job[0]], VARIANTS[job[1]]
                        found[job].append(
                            step_cost(bed, launcher, name, variant, options.loop, options.ranks)
                        )
                    latest = ", ".join(
                        f"{who if who != 'ours' else which} {1e3 * costs[-1].step_s:.1f}"
                        for (who, which), costs in found.items()
                    )
                    say(f"{name}, rate {rate}, round {number} of {options.rounds} [ms]: {latest}")
                rows += _rows(name, rate, found)
    ranks = "Two ranks" if options.ranks > 1 else "One rank"
    note = f"{ranks} with one thread each; every job's figure is the slower rank's median step."
    if not own:
        beside = "with its DDP" if options.ranks > 1 else "alone"
        note += f" {LOOPS[options.loop]} Trainer trains; the row ddp is the Trainer {beside}."
    if options.in_turn:
        note += f" Ours and DDP in turn in one job, {BLOCK} steps each"
        note += f", after {options.settle} steps of ours." if options.settle else "."
    if options.trace:
        note = "Means of the middle half of the steps [ms], of the rank that waits least."
    hosts = f"{RANKS} virtual hosts (namespaces)"
    body = {"parts" if options.trace else "steps": rows}
    return Result("step_time", conditions(hosts, note, load_before), body)


def _traced(
    bed: Testbed, name: str, rate: str, variants: Sequence[str], say: Say
) -> list[dict[str, Any]]:
    """Return a row for each part of a step, with a column for each variant."""
    columns = {each: parts_of_steps(bed, name, VARIANTS[each]) for each in variants}
    totals = {each: sum(parts.values()) for each, parts in columns.items()}
    say(f"{name}, rate {rate} [ms]: {', '.join(f'{1e3 * s:.1f}' for s in totals.values())}")
    rows = [
        {"model": name, "rate": rate, "part": meaning}
        | {each: round(1e3 * columns[each][part], 2) for each in variants}
        for part, meaning in PARTS.items()
    ]
    whole = {each: round(1e3 * total, 2) for each, total in totals.items()}
    return [*rows, {"model": name, "rate": rate, "part": "the whole step", **whole}]


def _rows(name: str, rate: str, found: dict[tuple[str, str], list[Cost]]) -> list[dict[str, Any]]:
    base = found.get(("ddp", "plain"))
    rows = []
    for (who, variant), costs in found.items():
        times = [cost.step_s for cost in costs]
        row: dict[str, Any] = {"model": MODELS[name].described, "rate": rate, "launcher": who}
        row |= {"variant": variant, "step_ms": round(1e3 * statistics.median(times), 2)}
        row["cpu_ms"] = round(1e3 * statistics.median(cost.cpu_s for cost in costs), 2)
        row["switches"] = round(statistics.median(cost.switches for cost in costs))
        if base is not None and who != "ddp":
            ratios = [mine / other.step_s for mine, other in zip(times, base, strict=True)]
            low, high = interval(ratios)
            row["to_ddp"] = round(statistics.median(ratios), 3)
            row["interval"] = [round(low, 3), round(high, 3)]
        rows.append({**row, "samples_s": [round(each, 5) for each in times]})
    return rows


def main() -> int:
    """Run the benchmark, or with ``--train`` its script; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    if "--train" in sys.argv:
        parser.add_argument("--train", action="store_true")
        parser.add_argument("--launcher", choices=LAUNCHERS)
        parser.add_argument("--model", choices=MODELS)
        parser.add_argument("--adaptive", action="store_true")
        parser.add_argument("--compression", default="none")
        parser.add_argument("--in-turn", action="store_true")
        parser.add_argument("--settle", type=int, default=0)
        parser.add_argument("--loop", choices=LOOPS, default="plain")
        parser.add_argument("--ranks", type=int, default=RANKS)
        train(parser.parse_known_args()[0])  # torchrun's launcher adds an option of its own
        return 0
    told = "rows, separated by commas"
    parser.add_argument("--models", type=names, default=list(MODELS), help=told)
    told = "rates of the links, such as none,1gbit"
    parser.add_argument("--rates", type=names, default=["none", "1gbit"], help=told)
    told = "variants of ours: plain, adaptive, bf16, audit, checkpoints"
    parser.add_argument("--variants", type=names, default=["plain"], help=told)
    parser.add_argument("--peers", type=names, default=["ddp", "horovod"], help="ddp, horovod")
    told = "what trains: a loop of the script's own, or a Trainer"
    parser.add_argument("--loop", choices=LOOPS, default="plain", help=told)
    parser.add_argument("--ranks", type=int, choices=(1, RANKS), default=RANKS)
    told = "jobs of each launcher; 12 at least decide a ratio"
    parser.add_argument("--rounds", type=at_least_one, default=12, help=told)
    told = "train with ours and DDP in turn in one job; --peers does not matter"
    parser.add_argument("--in-turn", action="store_true", help=told)
    told = "with --in-turn: steps of ours before the first block, in which the noise becomes known"
    parser.add_argument("--settle", type=int, default=0, help=told)
    told = "print the parts of a median step of ours, from one job for each variant"
    parser.add_argument("--trace", action="store_true", help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
