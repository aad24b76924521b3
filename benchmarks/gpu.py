"""Measures rescales, failures, replacements and the time of a step with NCCL on GPUs.

Run it on a machine with a GPU: ``python benchmarks/gpu.py --out benchmarks/results/gpu.json``; see
README.md here, and ``gpu_session.sh`` for a machine without a network. If there are fewer GPUs than
workers, workers share one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.command import Say, check_names, run_benchmark
from benchmarks.testbed.figures import Result, conditions, figure, spread
from benchmarks.testbed.launchers import OUR_PROGRAM, ROOT, start_logged, write_hostfile
from benchmarks.testbed.run_processes import processes_of
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.formatting import count
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import Follower, Record, decode_record, read_records
from hvd_elastic.records.run_folder import RunFolder, new_run_id

PARTS = ("faults", "template", "overhead")
WIDTH, LAYERS, EXAMPLES, BATCH = 512, 16, 4096, 256
FAILURE_TIMEOUT_S = 2.0
QUIET_STEPS = 30
DEADLINE_S = 120.0
TEMPLATE_S = 15.0
"""Time for a template to import, at a low priority."""
WORKER = "HVD_ELASTIC_WORKER"
IMAGES, WARM_STEPS, BLOCK_STEPS = 128, 200, 8
PRECISIONS = ("float32", "bfloat16")
OURS = ("fixed", "adaptive")
"""Whether the batch of ours adapts."""
STEPS = ("plain", "ddp", "ours")
"""What is timed in turn: a step of the optimizer alone, of DDP, and of ours."""


def train(args: argparse.Namespace) -> None:
    """Run one worker of the disturbed job, which checks that all ranks' parameters are equal."""
    # NCCL refuses two ranks on one GPU of one host, so each worker gets a host id of its own.
    os.environ["NCCL_HOSTID"] = os.environ[WORKER]
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import hvd_elastic.torch as hvd

    hvd.init()
    device = hvd.device()

    def network() -> nn.Module:
        torch.manual_seed(0)
        layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(device)

    def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))

    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model)
    data = TensorDataset(torch.randn(EXAMPLES, WIDTH), torch.randint(10, (EXAMPLES,)))
    # The batch may adapt, so gradients are sampled too.
    loader: hvd.DataLoader[Any] = hvd.DataLoader(
        data, BATCH, shuffle=True, max_batch_size=2 * BATCH
    )

    def warm_up() -> None:
        loss_of(network(), *data[:BATCH]).backward()

    def compare() -> None:
        own = torch.stack([each.double().sum() for each in model.parameters()]).sum().reshape(1)
        sums = hvd.allgather(own, "sum of parameters")
        if not bool((sums == sums[0]).all()) or not bool(sums.isfinite().all()):
            raise RuntimeError(f"the ranks' parameters differ: {sums.tolist()}")

    def over() -> bool:
        there = torch.tensor([float(args.until.exists())])
        return float(hvd.allreduce(there, "over", average=False)) > 0

    def steps(state: hvd.State) -> None:
        for _ in hvd.epochs(10**9):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = loss_of(model, inputs, targets)
                loss.backward()
                optimizer.step()
                state.commit(loss=loss)
            compare()
            if over():
                return

    hvd.run(steps, warmup=warm_up)(hvd.State(model=model, optimizer=optimizer))


def overhead(args: argparse.Namespace) -> None:
    """Run a worker of the job that trains in turn with a plain optimizer, with DDP and with ours.

    The ranks divide a batch of the same size, so that each number of them has the same work.
    """
    os.environ["NCCL_HOSTID"] = os.environ[WORKER]  # as in train()
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import TensorDataset

    import hvd_elastic.torch as hvd
    from hvd_elastic.bench.models import resnet50

    hvd.init()
    device = hvd.device()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    share = IMAGES // args.ranks
    images = torch.randn(share, 3, 224, 224, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (share,), device=device)

    def network() -> torch.nn.Module:
        model: Any = resnet50()
        placed: torch.nn.Module = model.to(device, memory_format=torch.channels_last)
        return placed

    def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(model: torch.nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        half = args.precision == "bfloat16"
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    ours = network()
    adapts = args.ours == "adaptive"
    rule: dict[str, Any] = {"lr_rule": "adascale"} if adapts else {}
    optimizer = hvd.DistributedOptimizer(optimizer_of(ours), ours, **rule)
    # The images stay on the GPU; the loader only returns row numbers.
    rows = TensorDataset(torch.arange(IMAGES * (WARM_STEPS + BLOCK_STEPS * (args.rounds + 1))))
    loader: Any = hvd.DataLoader(rows, IMAGES, max_batch_size=IMAGES if adapts else None)
    times: dict[str, list[float]] = {name: [] for name in STEPS}

    def steps(_state: hvd.State) -> None:
        meeting = f"file://{args.result}.ddp"
        dist.init_process_group("nccl", meeting, rank=hvd.rank(), world_size=args.ranks)
        plain = network()
        replicated = DistributedDataParallel(network())
        batches = iter(loader)

        def our_step() -> None:
            next(batches)
            step(ours, optimizer)

        plain_optimizer, ddp_optimizer = optimizer_of(plain), optimizer_of(replicated)
        step_of: dict[str, Callable[[], None]] = {
            "plain": lambda: step(plain, plain_optimizer),
            "ddp": lambda: step(replicated, ddp_optimizer),
            "ours": our_step,
        }

        def timed(name: str, count: int) -> float:
            torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(count):
                step_of[name]()
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / count

        # Every step is sampled until the noise scale is known, which it is after these steps.
        timed("ours", WARM_STEPS if adapts else BLOCK_STEPS)
        for number in range(args.rounds + 1):
            for name in STEPS:
                took_s = timed(name, BLOCK_STEPS)
                if number:  # the first round is to warm up
                    times[name].append(took_s)
        dist.destroy_process_group()
        if hvd.rank() == 0:
            args.result.write_text(json.dumps(times), encoding="utf-8")

    hvd.run(steps)(hvd.State(model=ours, optimizer=optimizer))


class Disturbed:
    """A run of :func:`train` on this machine, and the figures from its events so far.

    Args:
        folder: for its files.
        templates: whether workers that are lost are replaced by forks of a template.
    """

    def __init__(self, folder: Path, *, templates: bool = True) -> None:
        self._hostfile, self._until = folder / "hosts", folder / "until"
        self.run_id = new_run_id()
        self.use(2)
        command = [
            *(*OUR_PROGRAM, "run", "--run-id", self.run_id),
            *("--hostfile", str(self._hostfile), "--audit", "--checkpoint-every", "0"),
            *("--failure-timeout", str(FAILURE_TIMEOUT_S), "--"),
            *(() if templates else ("env",)),  # whose workers no template can be
            *(sys.executable, str(Path(__file__).resolve()), "train", str(self._until)),
        ]
        self._log = folder / "log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = start_logged(command, self._log, environment)
        self._follower: Follower[Record] | None = None
        self._generations, self._size, self._steps, self._settled = 0, 0, 0, 0
        self.pauses: list[float] = []
        self.deaths: list[str] = []
        self.gpu_use: list[dict[str, float]] = []
        """What NVML has told of the first GPU, by field of ``GpuSample``."""

    def use(self, slots: int) -> None:
        """Set the number of processes that the run may have from now on."""
        write_hostfile(self._hostfile, {"localhost": slots})

    def settle(self, size: int, generations: int, quiet_steps: int = QUIET_STEPS) -> list[float]:
        """Wait until the run has had further generations and trains with ``size`` processes.

        Args:
            size: number of processes of the last generation.
            generations: number of further generations to wait for.
            quiet_steps: steps after the last of them to wait for.

        Returns:
            The pauses of these generations [s].

        Raises:
            RunError: that did not happen in time, or the run has ended.
        """
        wanted, seen = self._generations + generations, len(self.pauses)
        deadline = time.monotonic() + DEADLINE_S
        while (
            self._generations < wanted
            or self._size != size
            or self._steps < self._settled + quiet_steps
        ):
            self._look()
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RunError(
                    f"{size} processes did not train on within {DEADLINE_S:.0f} s "
                    f"(now {self._size}, run {self.run_id}):\n{self.tail()}"
                )
            time.sleep(0.02)
        return self.pauses[seen:]

    def _look(self) -> None:
        if self._follower is None:
            try:
                self._follower = Follower(RunFolder.open(self.run_id).events, decode_record)
            except RunError:
                return  # the run has not created its folder yet
        for event in self._follower.poll():
            if event["kind"] == "rescale_finished":
                self._generations += 1
                self._size = event["size"]
                self._settled = self._steps
                self.pauses.append(event["pause_s"])
            elif event["kind"] == "metrics":
                self._steps = event["step"]
            elif event["kind"] == "worker_left":
                self.deaths.append(event["cause"])
            elif event["kind"] == "host_sample":
                self.gpu_use += event["gpus"][:1]

    def workers(self) -> list[psutil.Process]:
        """Return the living worker processes, the oldest first."""
        found = []
        for process in processes_of(self.run_id):
            with contextlib.suppress(psutil.Error):
                if WORKER in process.environ():
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def finish(self) -> None:
        """End training, and check that every example was used exactly once.

        Raises:
            RunError: the run failed, or an example was lost or used twice.
        """
        self._until.touch()
        try:
            status = self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise RunError(f"the run did not end:\n{self.tail()}") from None
        if status:
            raise RunError(f"the run ended with status {status}:\n{self.tail()}")
        audit = check_audit(read_records(RunFolder.open(self.run_id).audit), finished=True)
        if not audit.ok:
            raise RunError(audit.sentence())

    def end(self) -> None:
        """End the run if it is still running."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def tail(self) -> str:
        """Return the last lines of the run's output."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])


def measure_faults(rounds: int, say: Say) -> dict[str, list[dict[str, Any]]]:
    """Measure the pauses of rescales and failures, and what NVML tells of the GPU meanwhile.

    Raises:
        RunError: a worker died for a reason that the benchmark did not cause.
    """
    events = {
        "a process joins": "",
        "a process is asked to leave": "left",
        "kill -9 of a worker": "was killed by signal 9",
        "SIGSTOP of a worker": "gave no sign of life",
    }
    pauses: dict[str, list[float]] = {name: [] for name in events}
    joins, leaves, kill, stop = pauses
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-gpu-") as temporary:
        run = Disturbed(Path(temporary))
        try:
            run.settle(2, 1)
            for number in range(rounds):
                run.use(3)
                pauses[joins] += run.settle(3, 1)
                run.workers()[number % 3].send_signal(signal.SIGKILL)
                lost, back = run.settle(3, 2)
                pauses[kill].append(lost)
                pauses[joins].append(back)
                run.workers()[(number + 1) % 3].send_signal(signal.SIGSTOP)
                lost, back = run.settle(3, 2)
                pauses[stop].append(lost)
                pauses[joins].append(back)
                run.use(2)
                pauses[leaves] += run.settle(2, 1)
                say(f"round {number + 1} of {rounds}: " + "; ".join(map(_last, pauses.items())))
            deaths = list(run.deaths)
            run.finish()
        finally:
            run.end()
    causes = [cause for cause in events.values() if cause]
    unexpected = [death for death in deaths if not any(cause in death for cause in causes)]
    if unexpected:
        raise RunError(f"workers ended by themselves: {', '.join(unexpected)}")
    rows = [{"event": name, "pause_s": figure(taken)} for name, taken in pauses.items()]
    say(f"the most that NVML has told: {_most(run.gpu_use)}")
    return {"faults": rows, "nvml": [_most(run.gpu_use)]}


def _most(samples: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the largest value of each field."""
    most: dict[str, float] = {}
    for sample in samples:
        most |= {name: max(value, most.get(name, value)) for name, value in sample.items()}
    return most


def measure_template(rounds: int, say: Say) -> list[dict[str, Any]]:
    """Measure the time from the kill of a worker until its successor trains."""
    rows = []
    for templates in (True, False):
        refills = []
        with tempfile.TemporaryDirectory(prefix="hvd_elastic-gpu-") as temporary:
            run = Disturbed(Path(temporary), templates=templates)
            try:
                run.settle(2, 1)
                time.sleep(TEMPLATE_S)
                for _ in range(rounds):
                    run.workers()[0].send_signal(signal.SIGKILL)
                    began = time.monotonic()
                    run.settle(2, 2, quiet_steps=0)
                    refills.append(time.monotonic() - began)
                    run.settle(2, 0)
                run.finish()
            finally:
                run.end()
        rows.append({"templates": templates, "refill_s": figure(refills)})
        say(f"a successor {'from a' if templates else 'without'} template: {refills[-1]:.2f} s")
    return rows


def _last(taken: tuple[str, list[float]]) -> str:
    return f"{taken[0]} {taken[1][-1]:.2f} s"


def measure_overhead(rounds: int, say: Say) -> list[dict[str, Any]]:
    """Measure the step time of ResNet-50 with ours, relative to the optimizer alone and to DDP."""
    rows = []
    for ranks, ours, precision in itertools.product((1, 2), OURS, PRECISIONS):
        with tempfile.TemporaryDirectory(prefix="hvd_elastic-gpu-") as temporary:
            result = Path(temporary) / "times.json"
            command = [
                *(*OUR_PROGRAM, "run", "--np", str(ranks), "--checkpoint-every", "0", "--"),
                *(sys.executable, str(Path(__file__).resolve()), "overhead", str(result)),
                *(precision, ours, str(ranks), str(rounds)),
            ]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode != 0:
                raise RunError(f"the job ended with {done.returncode}:\n{done.stdout[-2000:]}")
            times = json.loads(result.read_text(encoding="utf-8"))
        ratios = {
            f"relative to {name}": spread([a / b for a, b in zip(*pair, strict=True)])
            for name, pair in ((name, (times["ours"], times[name])) for name in STEPS[:2])
        }
        row = {"network": "ResNet-50", "ranks": ranks, "precision": precision, "ours": ours}
        medians = {f"{name}_s": statistics.median(taken) for name, taken in times.items()}
        rows.append({**row, "batch": IMAGES, **medians, **ratios})
        told = ", ".join(f"{ratio['median']:.3f} {name}" for name, ratio in ratios.items())
        say(f"ResNet-50, {count(ranks, 'rank')}, {precision}, {ours} batch: {told}")
    return rows


def what_lacks() -> str | None:
    """Return why the benchmark cannot run here, or None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed; use: make env"
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU that PyTorch can use"
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not built; use: hvd-elastic build-horovod"
    import horovod.torch as horovod

    if not horovod.nccl_built():
        return "Horovod was built without NCCL; use: hvd-elastic build-horovod --rebuild"
    return None


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Measure the parts that the command line names."""
    if args.rounds < 1:
        raise UsageError(f"--rounds {args.rounds}: at least 1")
    check_names("--parts", args.parts, PARTS)
    lacking = what_lacks()
    if lacking is not None:
        raise RunError(f"benchmarks/gpu.py cannot run here: {lacking}")
    import torch

    load_before = os.getloadavg()
    found: dict[str, list[dict[str, Any]]] = {}
    if "faults" in args.parts:
        found |= measure_faults(args.rounds, say)
    if "template" in args.parts:
        found["template"] = measure_template(args.rounds, say)
    if "overhead" in args.parts:
        found["overhead"] = measure_overhead(4 * args.rounds, say)
    gpus = torch.cuda.device_count()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    hosts = f"{gpus} x {torch.cuda.get_device_name()}"
    note = f"SIGSTOP is noticed after a failure timeout of {FAILURE_TIMEOUT_S:g} s."
    if gpus < 3:
        note += " Workers share a GPU, and NCCL runs between them over sockets."
    return Result("gpu", conditions(hosts, note, load_before, {"nccl": version}), found)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, or one of its jobs; return the exit status."""
    jobs = argparse.ArgumentParser(add_help=False)
    of = jobs.add_subparsers(dest="job")
    of.add_parser("train").add_argument("until", type=Path)
    costing = of.add_parser("overhead")
    costing.add_argument("result", type=Path)
    costing.add_argument("precision", choices=PRECISIONS)
    costing.add_argument("ours", choices=OURS)
    costing.add_argument("ranks", type=int)
    costing.add_argument("rounds", type=int)
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["train"], ["overhead"]):
        args = jobs.parse_args(words)
        (train if args.job == "train" else overhead)(args)
        return 0
    about = __doc__ or ""
    parser = argparse.ArgumentParser(description=about.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each event (default: 3)")
    parser.add_argument("--parts", nargs="+", default=PARTS)
    return run_benchmark(parser, measure, words)


if __name__ == "__main__":
    sys.exit(main())
