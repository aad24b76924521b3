"""Measures runs on the machines of an engine, beside the engine's own launcher, in one run.

Run it: ``python benchmarks/engines.py --repetitions 3``. For each engine: the time from the command
to the first finished step, the pause at a lost node, the pause when one more joins, and a step
beside one of a run over ssh. Virtual hosts stand for machines; the engine's daemons run on them and
are started anew for each job, before its time begins.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.elasticity.rows import crash
from benchmarks.elasticity.stage import STEP_TIME_S, Stage
from benchmarks.step_time import Cost
from benchmarks.testbed.command import (
    Say,
    at_least_one,
    check_names,
    names,
    run_benchmark,
)
from benchmarks.testbed.environments import PeerMissingError
from benchmarks.testbed.figures import Figure, Result, conditions, figure, table
from benchmarks.testbed.hosts import Testbed
from benchmarks.testbed.launchers import (
    OUR_PROGRAM,
    OURS,
    ROOT,
    DriverJob,
    FailedPlayError,
    Job,
    Launcher,
    Order,
)
from benchmarks.testbed.marks import first_step
from benchmarks.testbed.ray import VirtualRay
from benchmarks.testbed.slurm import SlurmCluster, missing_programs
from benchmarks.testbed.spark import SparkCluster
from hvd_elastic.errors import UsageError

_HOSTS = 3
_LIMIT_S = 120.0
_STEP = "a step"
_CASES = ("first step", "a node is lost", "a node joins", _STEP)
_WARM_STEPS, _STEPS_S = 60, 8.0
"""Steps before those of the case "a step", and time for both [s]."""
_NOTE = (
    "Steps are padded to 15 ms, except where they are measured. One round before the measured ones "
    "warms the file cache for all. A lost node has all its processes killed at once; on Spark, "
    "the executor is killed."
)


@dataclass(frozen=True)
class Engine:
    """An engine with the launchers that are compared on it.

    Attributes:
        name: name for the table.
        ours: ours, for each case.
        theirs: the engine's own.
        cannot: case → why the engine's own launcher is not measured in it.
        lose: takes the third host away; returns when [s, monotonic].
        join: has the third host come; returns when the run is given it [s, monotonic].
        theirs_left: number of ranks with which the engine's own launcher goes on after a loss.
    """

    name: str
    ours: Mapping[str, Launcher]
    theirs: Launcher
    cannot: Mapping[str, str] = field(default_factory=dict)
    lose: Callable[[Job], float] = crash
    join: Callable[[Job], float] | None = None
    theirs_left: int = _HOSTS - 1


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        engine, case, launcher: what was measured.
        times: what was measured of it [s].
        failed: why there are none, or fewer than there should be; empty: there are all.
    """

    engine: str
    case: str
    launcher: str
    times: Figure
    failed: str

    @property
    def text(self) -> str:
        """Return the times, or why there are none."""
        times = str(self.times) if self.times.samples_s else ""
        return ", ".join(filter(None, (times, self.failed)))


# -- jobs --------------------------------------------------------------------------------------

_Daemons = TypeVar("_Daemons", SlurmCluster, SparkCluster, VirtualRay)


class _EngineJob(DriverJob):
    """A job on daemons of its own, which end with it.

    Args:
        daemons: the engine, started.
        environment: variables of the command beside the common ones.
    """

    def __init__(
        self,
        launcher: Launcher,
        bed: Testbed,
        folder: Path,
        order: Order,
        daemons: SlurmCluster | SparkCluster | VirtualRay,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self.daemons = daemons
        super().__init__(launcher.name, bed, folder, order, command, environment)

    def begin_when_told(self, never: str) -> None:
        """Wait until the program has its session; the job's time begins there."""
        told = self.folder / "asked"
        try:
            self.wait(told.exists, _LIMIT_S, never)
        except BaseException:
            self.end()
            raise
        self.asked = float(told.read_text(encoding="utf-8"))

    def end(self) -> None:
        super().end()
        self.daemons.stop()


def _daemons(job: Job, kind: type[_Daemons]) -> _Daemons:
    assert isinstance(job, _EngineJob)
    assert isinstance(job.daemons, kind)
    return job.daemons


def _variables(folder: Path) -> dict[str, str]:
    """Return the variables of training processes and of their launcher."""
    return {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HVD_ELASTIC_HOME": str(folder / "home"),
        "GLOO_SOCKET_IFNAME": "eth0",
    }


def _given_third(job: Job, never: str) -> float:
    """Return when the run was given its third host [s, monotonic]; what came before is not ours."""
    return job.wait(
        lambda: next(
            (e["mono"] for e in job.events("hosts_changed") if len(e["hosts"]) == _HOSTS), None
        ),
        _LIMIT_S,
        never,
    )


# -- Slurm -------------------------------------------------------------------------------------


class _OnSlurm(Launcher):
    needs_nodes: ClassVar[int] = _HOSTS

    def prepare(self) -> list[Path]:
        if missing := missing_programs():
            raise PeerMissingError(f"Slurm is not installed ({', '.join(missing)} missing)")
        return super().prepare()

    def launch(self, bed: Testbed, folder: Path, order: Order) -> Job:
        slurm = SlurmCluster(bed.cluster, folder / "slurm")
        slurm.start()
        environment = {
            **slurm.environment,
            **_variables(folder),
            # Without this setting an agent of torchrun that joins hangs for 60 s.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        try:
            # Nodes that the job does not begin with come when Slurm gets them.
            for host in bed.hosts[self.needs_nodes :]:
                slurm.call("scontrol", "update", f"nodename={host}", "state=drain", "reason=later")
            command = self.command(bed, folder, order)
            return _EngineJob(self, bed, folder, order, slurm, command, environment)
        except BaseException:
            slurm.stop()
            raise

    def command(self, bed: Testbed, folder: Path, order: Order) -> list[str]:
        """Return the command that starts the job."""
        raise NotImplementedError


def _allocated(*command: str) -> list[str]:
    options = [f"--nodes={_HOSTS}", "--ntasks-per-node=1", "--no-kill", "--quiet"]
    return ["salloc", *options, *command]


def _training(folder: Path, order: Order) -> list[str]:
    return ["-m", "benchmarks.testbed.marking", str(folder / "marks"), *order.training]


class _Ours(_OnSlurm):
    key = "ours"
    name = "hvd-elastic run in salloc"
    script = "train_ours.py"
    is_ours = True

    def command(self, bed: Testbed, folder: Path, order: Order) -> list[str]:
        run = [*OUR_PROGRAM, "run", "--run-id", "bench", "--min-np", str(order.min_np), "--"]
        return _allocated(*run, sys.executable, *_training(folder, order))


class _OursSubmitted(_Ours):
    key = "submitted"
    name = "hvd-elastic slurm submit"
    needs_nodes = _HOSTS - 1

    def command(self, bed: Testbed, folder: Path, order: Order) -> list[str]:
        submit = [*OUR_PROGRAM, "slurm", "submit", "--run-id", "bench"]
        submit += ["--nodes", f"{_HOSTS - 1}-{_HOSTS}", "--"]
        command = shlex.join([*submit, sys.executable, *_training(folder, order)])
        # The command ends once the job is queued; the benchmark wants a process that does not.
        waits = "while squeue -h --name=hvd-bench | grep -q .; do sleep 1; done"
        return ["sh", "-c", f"{command} && {waits}"]


class _Torchrun(_OnSlurm):
    key = "torchrun"
    name = "srun torchrun"
    script = "train_torchrun.py"

    def command(self, bed: Testbed, folder: Path, order: Order) -> list[str]:
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{_HOSTS}"),
            *("--nproc-per-node", "1", "--max-restarts", "100", "--rdzv-backend", "c10d"),
            *("--rdzv-id", "bench"),
            *("--rdzv-endpoint", f"{bed.cluster.address(bed.hosts[0])}:29400"),
            *(*_training(folder, order), "--snapshot", str(folder / "snapshot")),
        ]
        # At its defaults srun ends all tasks once one has failed.
        survives = ["--no-kill", "--wait=0", "--kill-on-bad-exit=0"]
        return _allocated("srun", *survives, *torchrun)


def _more_room(job: Job) -> float:
    """Have Slurm get the third node; return when the run is given it [s, monotonic]."""
    host = job.bed.hosts[-1]
    _daemons(job, SlurmCluster).call("scontrol", "update", f"nodename={host}", "state=resume")
    return _given_third(job, "Slurm did not grant the node")


# -- Spark and Ray: programs of users ----------------------------------------------------------


class _Program(Launcher):
    """A program of a user, ours or with the engine's own class.

    Attributes:
        package: what has to be installed for it, which is also the name of our extra.
    """

    package: ClassVar[str]

    def prepare(self) -> list[Path]:
        if importlib.util.find_spec(self.package) is None:
            extra = self.package.removeprefix("py")
            raise PeerMissingError(
                f"{self.package} is not installed: pip install '.[{extra}]' in the checkout"
            )
        return super().prepare()

    def words(self, folder: Path, order: Order) -> list[str]:
        """Return the words of the program's command line."""
        whose = "ours" if self.is_ours else "theirs"
        marking = str(ROOT / "benchmarks" / "testbed" / "marking.py")
        words = [whose, str(folder), str(order.workers), str(order.most), marking]
        words += [str(folder / "marks"), *order.training]
        return words if self.is_ours else [*words, "--snapshot", str(folder / "snapshot")]


class _OnSpark(_Program):
    package = "pyspark"

    def launch(self, bed: Testbed, folder: Path, order: Order) -> Job:
        spark = SparkCluster(bed.cluster, folder / "spark")
        environment = {**spark.driver_environment, **_variables(folder)}
        program = [sys.executable, "-m", "benchmarks.testbed.spark_program"]
        try:
            spark.start()
            for host in order.slots:
                spark.start_worker(host)
            command = [*program, *self.words(folder, order)]
            job = _EngineJob(self, bed, folder, order, spark, command, environment)
        except BaseException:
            spark.stop()
            raise
        job.begin_when_told("Spark gave no executors")
        return job


class _OursOnSpark(_OnSpark):
    key = "ours-spark"
    name = "hvd_elastic.spark"
    script = "train_ours.py"
    is_ours = True


class _TheirsOnSpark(_OnSpark):
    key = "pyspark"
    name = "pyspark.ml.torch"
    script = "train_torchrun.py"


def _kill_executor(job: Job) -> float:
    """Kill the executor on the third host; return when [s, monotonic]."""
    asked = time.monotonic()
    for executor in _daemons(job, SparkCluster).executors(job.bed.hosts[2]):
        executor.kill()
    return asked


def _one_more_worker(job: Job) -> float:
    """Start a Spark worker on the third host; return when the run is given it [s, monotonic]."""
    _daemons(job, SparkCluster).start_worker(job.bed.hosts[-1])
    return _given_third(job, "Spark started no executor")


class _OnRay(_Program):
    package = "ray"

    def launch(self, bed: Testbed, folder: Path, order: Order) -> Job:
        ray = VirtualRay(bed.cluster, folder / "ray")
        ray.use([*order.slots])
        ray.up()
        setting = ["env", *(f"{name}={value}" for name, value in _variables(folder).items())]
        program = [*setting, "python", "-m", "benchmarks.testbed.ray_program"]
        command = ray.words("exec", "--cwd", str(ROOT), "--", *program, *self.words(folder, order))
        environment = {**os.environ, "HVD_ELASTIC_HOME": str(ray.home)}
        job = _EngineJob(self, bed, folder, order, ray, command, environment)
        job.begin_when_told("the program was not connected to Ray")
        return job


class _OursOnRay(_OnRay):
    key = "ours-ray"
    name = "hvd_elastic.ray"
    script = "train_ours.py"
    is_ours = True


class _TheirsOnRay(_OnRay):
    key = "ray-train"
    name = "Ray Train, elastic"
    script = "train_torchrun.py"


def _one_more_node(job: Job) -> float:
    """Start a Ray node on the third host; return when the run is given it [s, monotonic].

    For Ray Train, which tells nobody, that is when the node is up.
    """
    ray = _daemons(job, VirtualRay)
    ray.use(job.bed.hosts)
    ray.up()
    if job.launcher == _OursOnRay.name:
        return _given_third(job, "Ray placed no actor")
    return time.monotonic()


_OURS = _Ours()
ENGINES = {
    "slurm": Engine(
        "Slurm",
        {
            "first step": _OURS,
            "a node is lost": _OURS,
            "a node joins": _OursSubmitted(),
            _STEP: _OURS,
        },
        _Torchrun(),
        {"a node joins": "an allocation cannot grow"},
        join=_more_room,
    ),
    "spark": Engine(
        "Spark",
        dict.fromkeys(_CASES, _OursOnSpark()),
        _TheirsOnSpark(),
        {"a node joins": "the number of tasks of a barrier stage is fixed"},
        lose=_kill_executor,
        join=_one_more_worker,
        theirs_left=_HOSTS,  # the whole stage starts again, once there is another executor
    ),
    "ray": Engine("Ray", dict.fromkeys(_CASES, _OursOnRay()), _TheirsOnRay(), join=_one_more_node),
}
"""Engines by the name for ``--engines``."""


# -- measuring ---------------------------------------------------------------------------------


def _measure(stage: Stage, engine: Engine, launcher: Launcher, case: str) -> float:
    bed = stage.bed()
    hosts = _HOSTS - 1 if case == "a node joins" else _HOSTS
    order = Order(dict.fromkeys(bed.hosts[:hosts], 1), max_np=_HOSTS)
    padding_s = 0.0 if case == _STEP else STEP_TIME_S
    with stage.training(bed, launcher, order, step_time_s=padding_s) as job:
        if case == _STEP:
            time.sleep(_STEPS_S)
            job.marks.poll()
            costs = [Cost.of(process.steps[_WARM_STEPS:]) for process in job.marks.processes]
            return max(cost.step_s for cost in costs)
        if case == "first step":
            first = first_step(job.marks.processes)
            assert first is not None
            return first - job.asked
        if case == "a node is lost":
            left = _HOSTS - 1 if launcher.is_ours else engine.theirs_left
            return stage.pause_s(job, engine.lose(job), left, [(bed.hosts[2], 0)])
        assert engine.join is not None, "a case of this engine"
        return stage.pause_s(job, engine.join(job), _HOSTS)


def measure_engines(options: argparse.Namespace, say: Say) -> Result:
    """Measure the cases of each engine, after one round that is not measured."""
    check_names("--engines", options.engines, ENGINES)
    check_names("--cases", options.cases, _CASES)
    load_before = os.getloadavg()
    samples = _earlier(options.out) if options.add else {}
    failed: dict[tuple[str, str, str], str] = {}
    with Stage(_LIMIT_S, hosts=_HOSTS) as stage:
        for number in range(options.repetitions + 1):
            for key, case, launcher in _plays(options.engines):
                if case not in options.cases or (number == 0 and case != "first step"):
                    continue
                place = (key, case, launcher.name)
                try:
                    seconds = _measure(stage, ENGINES[key], launcher, case)
                except FailedPlayError as error:
                    failed[place] = error.short
                    say(f"round {number}: {key}, {case}, {launcher.name}: {error}")
                    continue
                say(f"round {number}: {key}, {case}, {launcher.name}: {seconds:.4g} s")
                if number:
                    samples.setdefault(place, []).append(seconds)
        hosts = stage.description
    rows = [
        Row(key, case, launcher.name, figure(samples.get(place, [])), failed.get(place, ""))
        for key, case, launcher in _plays(options.engines)
        for place in [(key, case, launcher.name)]
        if case in options.cases or place in samples
    ]
    rows += [
        Row(key, case, ENGINES[key].theirs.name, figure([]), f"not measured: {why}")
        for key in options.engines
        for case, why in ENGINES[key].cannot.items()
        if case in options.cases
    ]
    headings = ("engine", "case", "launcher", "median (range)")
    shown = [(row.engine, row.case, row.launcher, row.text) for row in rows]
    return Result(
        "engines",
        conditions(hosts, _NOTE, load_before, _versions(options.engines)),
        {"rows": rows},
        [table("On the machines of an engine", headings, shown)],
    )


def _earlier(out: Path | None) -> dict[tuple[str, str, str], list[float]]:
    """Return the measurements of an earlier call, which are beside its result."""
    raw = None if out is None else out.with_suffix(".raw.json")
    if raw is None or not raw.is_file():
        raise UsageError("--add adds to an earlier result with its measurements: name it by --out")
    rows = json.loads(raw.read_text(encoding="utf-8"))["rows"]
    return {
        (row["engine"], row["case"], row["launcher"]): list(row["times"]["samples_s"])
        for row in rows
    }


def _versions(keys: Sequence[str]) -> dict[str, str]:
    packages = [package for key, package in (("spark", "pyspark"), ("ray", "ray")) if key in keys]
    return {package: importlib.metadata.version(package) for package in packages}


def _plays(keys: Sequence[str]) -> Iterator[tuple[str, str, Launcher]]:
    """Yield engine, case and launcher in the order of a round."""
    for key in keys:
        engine = ENGINES[key]
        for case in _CASES:
            if case in engine.ours:
                yield key, case, engine.ours[case]
            if case not in engine.cannot:
                yield key, case, OURS if case == _STEP else engine.theirs


def main() -> int:
    """Run the benchmark with its command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="engines.py", description=__doc__)
    told = "measured rounds (3)"
    parser.add_argument("--repetitions", "-n", type=at_least_one, default=3, help=told)
    told = f"engines to measure ({','.join(ENGINES)})"
    parser.add_argument("--engines", type=names, default=[*ENGINES], help=told)
    told = f"cases to measure ({','.join(_CASES)})"
    parser.add_argument("--cases", type=names, default=[*_CASES], help=told)
    told = "add to the measurements of the result that --out names, of the same engines"
    parser.add_argument("--add", action="store_true", help=told)
    with contextlib.suppress(BrokenPipeError):
        return run_benchmark(parser, measure_engines)
    return 1


if __name__ == "__main__":
    sys.exit(main())
