"""Measures what an input host brings to a host whose cores cannot feed its device.

Example: ``python benchmarks/input.py --out benchmarks/results/input.json``. A training host with an
emulated device, and an input host of twice its cores, both held by control groups. The parts:

- ``throughput``: a transform takes as much processor time as the device takes for a step; beside
  the training host alone, Ray Data and the service of ``tf.data``.
- ``overhead``: input hosts where a transform costs nothing.
- ``words``: what the run says that training waits for, and what happens if one does what it says.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step_time import interval
from benchmarks.testbed.command import Say, at_least_one, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.hosts import end_processes
from benchmarks.testbed.launchers import OUR_PROGRAM, ROOT
from benchmarks.testbed.ray import VirtualRay
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.records.json_lines import read_events
from hvd_elastic.virtual import VirtualCluster
from hvd_elastic.virtual.cpushare import CpuGroups

PARTS = ("throughput", "overhead", "words")
TRAINS_CORES, READS_CORES = 0.5, 1.0
BATCH, STEP_MS = 16, 80.0
AS_HEAVY_MS = STEP_MS / BATCH
"""Processor time of an example whose step takes as long as the device."""
SCRIPTS = ROOT / "benchmarks" / "peers"
_STEPS = 14
"""Timed steps of a block, by default of the scripts."""
_LIMIT_S = 300.0
_PORT = 5050


@dataclass
class Hosts:
    """A training host and an input host.

    Args:
        cluster: the virtual hosts.
        folder: folder that they share with this machine.
        rounds: blocks of each kind in a process.
    """

    cluster: VirtualCluster
    folder: Path
    rounds: int
    _count: int = field(default=0, init=False)

    @property
    def trains(self) -> str:
        return self.cluster.hosts[0]

    @property
    def reads(self) -> str:
        return self.cluster.hosts[1]

    def give_cores(self, trains: float, reads: float) -> None:
        """Hold the hosts to these numbers of cores."""
        groups = CpuGroups.find(self.cluster.name)
        assert groups is not None
        for host, cores in ((self.trains, trains), (self.reads, reads)):
            groups.make(host, cores)

    def script(self, name: str, **options: Any) -> list[str]:
        """Return the words of a script; an option that is true has no value."""
        words = [sys.executable, str(SCRIPTS / f"{name}.py"), str(self.result)]
        for option, value in {"rounds": self.rounds, **options}.items():
            words += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
        return words

    @property
    def result(self) -> Path:
        return self.folder / "blocks.json"

    def blocks(self) -> list[dict[str, Any]]:
        """Return the blocks that a script has written."""
        return list(json.loads(self.result.read_text(encoding="utf-8")))

    def train(self, *options: str, **script: Any) -> tuple[list[dict[str, Any]], str]:
        """Train with ours; return the blocks, and what the run last said of its input."""
        self._count += 1
        hostfile, run_id = self.folder / "hosts", f"input-{self._count}"
        hostfile.write_text(f"{self.trains} slots=1\n", encoding="utf-8")
        run = [*OUR_PROGRAM, "run", "--checkpoint-every", "0"]
        run += ["--hostfile", str(hostfile), "--ssh-config", str(self.cluster.ssh_config)]
        home = self.folder / "home"
        done = subprocess.run(
            [*run, "--run-id", run_id, *options, "--", *self.script("read_ours", **script)],
            env={
                **os.environ,
                "HVD_ELASTIC_HOME": str(home),
                "PYTHONPATH": f"{ROOT / 'tests/quick_torch'}{os.pathsep}{ROOT}",
            },
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RunError(f"{shlex.join(options)}: {done.stdout}{done.stderr}")
        found = read_events(home / "runs" / run_id / "events.jsonl")
        said = [event["reason"] for event in found if event["kind"] == "input"]
        return self.blocks(), said[-1] if said else ""

    def on(self, host: str, words: Sequence[str], **variables: str) -> list[str]:
        """Return the words of a command that runs on a host, within its cores."""
        given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        command = ["env", *(f"{name}={value}" for name, value in given.items()), *words]
        return ["ssh", "-F", str(self.cluster.ssh_config), host, shlex.join(command)]

    def read_on_trains(self, words: Sequence[str], **variables: str) -> list[dict[str, Any]]:
        """Run the script of a peer on the training host; return its blocks."""
        self.result.unlink(missing_ok=True)
        done = subprocess.run(
            self.on(self.trains, words, **variables),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RunError(f"{words[1]}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return self.blocks()


def with_ray_data(hosts: Hosts) -> list[dict[str, Any]]:
    """Read with Ray Data on both hosts."""
    ray = VirtualRay(hosts.cluster, hosts.folder / "ray", cpus=1)
    ray.use(hosts.cluster.hosts)
    try:
        ray.up()
        words = hosts.script("read_ray", transform_ms=AS_HEAVY_MS, step_ms=STEP_MS, batch=BATCH)
        return hosts.read_on_trains(words, **ray.recorded.variables)
    finally:
        ray.call("down")


def with_tfdata_service(hosts: Hosts) -> list[dict[str, Any]]:
    """Read with the service of ``tf.data`` on the input host."""
    at = {"address": hosts.cluster.address(hosts.reads), "port": _PORT}
    heavy = {"transform_ms": AS_HEAVY_MS, "step_ms": STEP_MS, "batch": BATCH}
    subprocess.run(
        hosts.script("read_tfdata", calibrate=True, **at, **heavy),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        timeout=_LIMIT_S,
    )
    repetitions = int(hosts.result.read_text(encoding="utf-8"))
    with subprocess.Popen(
        hosts.on(hosts.reads, hosts.script("read_tfdata", serve=True, **at)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as service:
        assert service.stdout is not None
        try:
            if service.stdout.readline().strip() != "serves":
                raise RunError("the service of tf.data did not start")
            words = hosts.script("read_tfdata", repetitions=repetitions, **at, **heavy)
            return hosts.read_on_trains(words)
        finally:
            service.kill()
            end_processes(hosts.cluster, hosts.reads)


def ours(hosts: Hosts, *, helped: bool) -> list[dict[str, Any]]:
    """Read with the training host's own core, and with the input host too if ``helped``."""
    options = ["--input-hosts", hosts.reads] if helped else []
    script = {"transform_ms": AS_HEAVY_MS, "step_ms": STEP_MS, "batch": BATCH, "num_workers": 1}
    return hosts.train(*options, **script)[0]


@dataclass(frozen=True)
class Way:
    """A way to read.

    Attributes:
        read: returns its blocks.
        helped: whether the input host is paid for.
        module: package that it needs.
    """

    read: Callable[[Hosts], list[dict[str, Any]]]
    helped: bool = True
    module: str = "torch"


WAYS = {
    "training host alone": Way(lambda hosts: ours(hosts, helped=False), helped=False),
    "with the input host": Way(lambda hosts: ours(hosts, helped=True)),
    "Ray Data": Way(with_ray_data, module="ray.data"),
    "tf.data service": Way(with_tfdata_service, module="tensorflow"),
}


def compared(blocks: Sequence[Mapping[str, Any]], examples: int) -> dict[str, Any]:
    """Return the throughput of the blocks, and its ratio to that of the free blocks beside them.

    Args:
        blocks: of the kinds ``free`` and ``read`` in turn.
        examples: number of examples in the timed part of a block.
    """
    seconds = {
        kind: [each["seconds"] for each in blocks if each["kind"] == kind]
        for kind in ("free", "read")
    }
    ratios = [free / read for free, read in zip(seconds["free"], seconds["read"], strict=True)]
    low, high = interval(ratios)
    waits = [each["wait_s"] / each["seconds"] for each in blocks if each["kind"] == "read"]
    return {
        "examples_per_s": round(examples / median(seconds["read"]), 1),
        "of_free": round(median(ratios), 3),
        "interval": [round(low, 3), round(high, 3)],
        "waits": round(median(waits), 3),
        "samples": [round(ratio, 4) for ratio in ratios],
    }


def measure_throughput(options: argparse.Namespace, hosts: Hosts, say: Say) -> list[dict[str, Any]]:
    """Measure all ways to read a transform that is as heavy as the step."""
    rows = []
    for name in options.ways:
        way = WAYS[name]
        if importlib.util.find_spec(way.module.partition(".")[0]) is None:
            rows.append({"way": name, "missing": f"{way.module} is not installed"})
            continue
        try:
            found = compared(way.read(hosts), BATCH * _STEPS)
        except (RunError, AssertionError, subprocess.SubprocessError) as error:
            rows.append({"way": name, "missing": str(error)[-400:]})
            say(f"{name}: {error}")
            continue
        price = options.price_trains + (options.price_reads if way.helped else 0.0)
        found["cost_of_a_million"] = round(1e6 * price / 3600 / found["examples_per_s"], 3)
        rows.append({"way": name, **found})
        say(f"{name}: {found['of_free']} of a loader that costs nothing")
    return rows


def measure_overhead(hosts: Hosts, say: Say) -> list[dict[str, Any]]:
    """Measure input hosts where reading costs nothing."""
    script = {"step_ms": STEP_MS, "batch": BATCH, "num_workers": 0}
    blocks, _ = hosts.train("--input-hosts", hosts.reads, **script)
    found = compared(blocks, BATCH * _STEPS)
    say(f"overhead: {found['of_free']} of a loader that costs nothing")
    return [{"way": "input host, not needed", **found}]


@dataclass(frozen=True)
class Trial:
    """A remedy that is tried.

    Attributes:
        what: what is done, as on the command line.
        helped: whether the input host reads.
        script: options of the script that change.
        cores: of the training host.
    """

    what: str
    helped: bool = False
    cores: float = 1.0
    script: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """Something that training may wait for, and what is tried against it.

    Attributes:
        name: what it waits for.
        script: options of the script.
        helped: whether an input host reads from the beginning.
        trials: what is tried: first what the run says, then something else.
        rate: of the links of the hosts; None: not limited.
    """

    name: str
    script: Mapping[str, Any]
    trials: tuple[Trial, ...]
    helped: bool = False
    rate: str | None = None


BOUNDS = (
    Bound(
        "decoding",
        {"transform_ms": 2 * AS_HEAVY_MS, "num_workers": 1},
        (
            Trial("--input-hosts", helped=True),
            Trial("num_workers=3", script={"num_workers": 3}),
        ),
    ),
    Bound(
        "storage",
        {"wait_ms": 2 * AS_HEAVY_MS, "num_workers": 1},
        (
            Trial("num_workers=2", script={"num_workers": 2}),
            Trial("twice the cores", cores=2.0),
        ),
    ),
    Bound(
        "the link to the input host",
        {"transform_ms": AS_HEAVY_MS, "noise": True, "num_workers": 0},
        (
            Trial("num_workers=1", helped=True, script={"num_workers": 1}),
            Trial("pictures that can be compressed", helped=True, script={"noise": None}),
        ),
        helped=True,
        rate="13mbit",
    ),
    Bound(
        "nothing",
        {"transform_ms": AS_HEAVY_MS / 10, "num_workers": 1},
        (
            Trial("--input-hosts", helped=True),
            Trial("num_workers=2", script={"num_workers": 2}),
        ),
    ),
)
WORDS_STEPS = 110
"""Steps of a run whose words are read: some 9 s, and a finding needs 5 s."""


def measure_words(folder: Path, say: Say) -> Iterator[dict[str, Any]]:
    """Yield what runs say that they wait for, and the throughput with each remedy."""
    for bound in BOUNDS:
        with two_hosts(folder, 1, rate=bound.rate) as hosts:
            said, before = _run(hosts, bound, Trial("", bound.helped))
            say(f"{bound.name}: {said}")
            yield {"bound": bound.name, "said": said, "tried": "", "examples_per_s": before}
            for trial in bound.trials:
                _, after = _run(hosts, bound, trial)
                say(f"{bound.name}, {trial.what}: {after / before:.2f} of the throughput")
                yield {
                    "bound": bound.name,
                    "tried": trial.what,
                    "examples_per_s": after,
                    "of_before": round(after / before, 2),
                }


def _run(hosts: Hosts, bound: Bound, trial: Trial) -> tuple[str, float]:
    hosts.give_cores(trial.cores, 1.0)
    usual = {"step_ms": STEP_MS, "batch": BATCH, "only": True, "steps": WORDS_STEPS}
    script: dict[str, Any] = {**usual, **bound.script, **trial.script}
    script = {name: value for name, value in script.items() if value is not None}
    options = ["--input-hosts", hosts.reads] if trial.helped else []
    (block,), said = hosts.train(*options, **script)
    return said, round(BATCH * WORDS_STEPS / block["seconds"], 1)


@contextlib.contextmanager
def two_hosts(folder: Path, rounds: int, rate: str | None = None) -> Iterator[Hosts]:
    """Make the hosts for the length of the block.

    Raises:
        UsageError: cores cannot be held here.
    """
    if CpuGroups.find("probe") is None or os.geteuid() != 0:
        raise UsageError(
            "cores of hosts are held by control groups: run it as root, where they are"
        )
    with VirtualCluster.up(2, 1, cpus=TRAINS_CORES, rate=rate, shares=[folder]) as cluster:
        hosts = Hosts(cluster, folder, rounds)
        hosts.give_cores(TRAINS_CORES, READS_CORES)
        yield hosts


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure the parts that were asked for."""
    check_names("--parts", options.parts, PARTS)
    check_names("--ways", options.ways, WAYS)
    load_before = os.getloadavg()
    body: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-input-") as name:
        folder = Path(name)
        if {"throughput", "overhead"} & {*options.parts}:
            with two_hosts(folder, options.rounds) as hosts:
                if "throughput" in options.parts:
                    body["throughput"] = measure_throughput(options, hosts, say)
                if "overhead" in options.parts:
                    body["overhead"] = measure_overhead(hosts, say)
        if "words" in options.parts:
            body["words"] = [*measure_words(folder, say)]
    note = (
        f"Training host of {TRAINS_CORES:g} core, input host of {READS_CORES:g}; for `words`, one "
        f"core each. Prices: {options.price_trains:g} and {options.price_reads:g} per hour. Steps "
        f"of {STEP_MS:g} ms with {BATCH} pictures."
    )
    return Result("input", conditions("two virtual hosts", note, load_before), body)


def main() -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    told = f"of {', '.join(PARTS)}"
    parser.add_argument("--parts", type=names, default=list(PARTS), help=told)
    told = f"ways to read, of {', '.join(WAYS)}"
    parser.add_argument("--ways", type=names, default=list(WAYS), help=told)
    parser.add_argument("--rounds", type=at_least_one, default=12, help="pairs of blocks (12)")
    told = "price of the training host per hour (3)"
    parser.add_argument("--price-trains", type=float, default=3.0, help=told)
    told = "price of the input host per hour (0.4)"
    parser.add_argument("--price-reads", type=float, default=0.4, help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
