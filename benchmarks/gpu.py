"""Measures the cost of rescales, failures and adapting with NCCL on GPUs.

Run it on a machine with a GPU: ``python benchmarks/gpu.py --out benchmarks/results/gpu.json``; see
README.md here. If there are fewer GPUs than workers, workers share one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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

from benchmarks.soak.job import processes_of
from benchmarks.testbed.command import Say, check_names, run_benchmark
from benchmarks.testbed.figures import Result, conditions, figure, spread
from benchmarks.testbed.launchers import OUR_PROGRAM, ROOT, start_logged, write_hostfile
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import EventFollower, read_events
from hvd_elastic.records.run_folder import RunFolder, new_run_id

PARTS = ("faults", "overhead")
WIDTH, LAYERS, EXAMPLES, BATCH = 512, 16, 4096, 256
FAILURE_TIMEOUT_S = 2.0
QUIET_STEPS = 30
DEADLINE_S = 120.0
WORKER = "HVD_ELASTIC_WORKER"
IMAGES, WARM_STEPS, BLOCK_STEPS = 128, 200, 20
PRECISIONS = ("float32", "bfloat16")


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
    """Run the job that alternates between a plain optimizer and an adaptive one, on one GPU."""
    import torch
    import torchvision
    from torch.utils.data import DataLoader, TensorDataset

    import hvd_elastic.torch as hvd

    hvd.init()
    device = hvd.device()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    images = torch.randn(IMAGES, 3, 224, 224, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (IMAGES,), device=device)

    def network() -> torch.nn.Module:
        model: Any = torchvision.models.resnet50()
        placed: torch.nn.Module = model.to(device, memory_format=torch.channels_last)
        return placed

    def step(model: torch.nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        half = args.precision == "bfloat16"
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    ours, theirs = network(), network()
    sgd = torch.optim.SGD(ours.parameters(), lr=1e-3, momentum=0.9)
    adapting = hvd.DistributedOptimizer(sgd, ours, lr_rule="adascale")
    bare = torch.optim.SGD(theirs.parameters(), lr=1e-3, momentum=0.9)
    # The images stay on the GPU; the loaders only return row numbers.
    rows = TensorDataset(torch.arange(IMAGES * (WARM_STEPS + BLOCK_STEPS * args.rounds)))
    loader: Any = hvd.DataLoader(rows, IMAGES, max_batch_size=IMAGES)
    times: dict[str, list[float]] = {"bare": [], "adaptive": []}

    def steps(_state: hvd.State) -> None:
        batches = iter(loader)

        def adaptive_block(count: int) -> None:
            for _ in range(count):
                next(batches)
                step(ours, adapting)

        def bare_block(count: int) -> None:
            plain = iter(DataLoader(rows, IMAGES))
            for _ in range(count):
                next(plain)
                step(theirs, bare)

        def timed(block: Callable[[int], None], count: int) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            block(count)
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / count

        # Every step is sampled until the noise scale is known, which it is after these steps.
        timed(adaptive_block, WARM_STEPS)
        timed(bare_block, BLOCK_STEPS)
        for _ in range(args.rounds):
            times["bare"].append(timed(bare_block, BLOCK_STEPS))
            times["adaptive"].append(timed(adaptive_block, BLOCK_STEPS))

    hvd.run(steps)(hvd.State(model=ours, optimizer=adapting))
    args.result.write_text(json.dumps(times), encoding="utf-8")


class Disturbed:
    """A run of :func:`train` on this machine, and the figures from its events so far."""

    def __init__(self, folder: Path) -> None:
        self._hostfile, self._until = folder / "hosts", folder / "until"
        self.run_id = new_run_id()
        self.use(2)
        command = [
            *(*OUR_PROGRAM, "run", "--run-id", self.run_id),
            *("--hostfile", str(self._hostfile), "--audit", "--checkpoint-every", "0"),
            *("--failure-timeout", str(FAILURE_TIMEOUT_S), "--", sys.executable),
            *(str(Path(__file__).resolve()), "train", str(self._until)),
        ]
        self._log = folder / "log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = start_logged(command, self._log, environment)
        self._follower: EventFollower | None = None
        self._generations, self._size, self._steps, self._settled = 0, 0, 0, 0
        self.pauses: list[float] = []
        self.deaths: list[str] = []

    def use(self, slots: int) -> None:
        """Set the number of processes that the run may have from now on."""
        write_hostfile(self._hostfile, {"localhost": slots})

    def settle(self, size: int, generations: int) -> list[float]:
        """Wait until the run has had further generations and trains with ``size`` processes.

        Args:
            size: number of processes of the last generation.
            generations: number of further generations to wait for.

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
            or self._steps < self._settled + QUIET_STEPS
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
                self._follower = EventFollower(RunFolder.open(self.run_id).events)
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
        audit = check_audit(read_events(RunFolder.open(self.run_id).audit), finished=True)
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


def measure_faults(rounds: int, say: Say) -> list[dict[str, Any]]:
    """Measure the pauses of rescales and failures.

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
    return [{"event": name, "pause_s": figure(taken)} for name, taken in pauses.items()]


def _last(taken: tuple[str, list[float]]) -> str:
    return f"{taken[0]} {taken[1][-1]:.2f} s"


def measure_overhead(rounds: int, say: Say) -> list[dict[str, Any]]:
    """Measure the step time of ResNet-50, adaptive and with the optimizer alone."""
    rows = []
    for precision in PRECISIONS:
        with tempfile.TemporaryDirectory(prefix="hvd_elastic-gpu-") as temporary:
            result = Path(temporary) / "times.json"
            command = [
                *(*OUR_PROGRAM, "run", "--checkpoint-every", "0", "--", sys.executable),
                *(str(Path(__file__).resolve()), "overhead", str(result), precision, str(rounds)),
            ]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode != 0:
                raise RunError(f"the job ended with {done.returncode}:\n{done.stdout[-2000:]}")
            times = json.loads(result.read_text(encoding="utf-8"))
        pairs = zip(times["adaptive"], times["bare"], strict=True)
        ratios = [adaptive / bare for adaptive, bare in pairs]
        rows.append(
            {
                "network": "ResNet-50",
                "precision": precision,
                "batch": IMAGES,
                "bare_s": statistics.median(times["bare"]),
                "adaptive_s": statistics.median(times["adaptive"]),
                **spread(ratios),
            }
        )
        say(f"ResNet-50, {precision}: {rows[-1]['median']:.4f} times the step")
    return rows


def what_lacks(parts: Iterable[str]) -> str | None:
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
    if "overhead" in parts and importlib.util.find_spec("torchvision") is None:
        return "the part overhead needs torchvision, or use: --parts faults"
    return None


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Measure the parts that the command line names."""
    if args.rounds < 1:
        raise UsageError(f"--rounds {args.rounds}: at least 1")
    check_names("--parts", args.parts, PARTS)
    lacking = what_lacks(args.parts)
    if lacking is not None:
        raise RunError(f"benchmarks/gpu.py cannot run here: {lacking}")
    import torch

    load_before = os.getloadavg()
    found: dict[str, list[dict[str, Any]]] = {}
    if "faults" in args.parts:
        found["faults"] = measure_faults(args.rounds, say)
    if "overhead" in args.parts:
        found["overhead"] = measure_overhead(5 * args.rounds, say)
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
