"""Measures what an input host brings to a host whose cores cannot feed its device.

Example: ``python benchmarks/input.py --out benchmarks/results/input.json``. A training host with an
emulated device, and an input host of twice its cores, both held by control groups. The parts:

- ``throughput``: a transform takes as much processor time as the device takes for a step; beside
  the training host alone, Ray Data and the service of ``tf.data``.
- ``overhead``: input hosts where a transform costs nothing.
- ``words``: what the run, and ``hvd-elastic bench input`` before it, say that training waits for,
  and what happens if one does what they say, or something else.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step_time import interval
from benchmarks.testbed.command import Say, at_least_one, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.hosts import Testbed, end_processes, make_testbed
from benchmarks.testbed.launchers import OUR_PROGRAM, OURS, ROOT, Order
from benchmarks.testbed.links import limit_link
from benchmarks.testbed.ray import VirtualRay
from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.records.json_lines import Record
from hvd_elastic.virtual import VirtualCluster
from hvd_elastic.virtual.netns import Namespaces
from hvd_elastic.virtual.plan import parse_rate
from hvd_elastic.virtual.processes import CpuGroups

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
        bed: the virtual hosts.
        rounds: blocks of each kind in a process.
    """

    bed: Testbed
    rounds: int

    @property
    def cluster(self) -> VirtualCluster:
        return self.bed.cluster

    @property
    def trains(self) -> str:
        return self.cluster.hosts[0]

    @property
    def reads(self) -> str:
        return self.cluster.hosts[1]

    def give_cores(self, trains: float, reads: float) -> None:
        """Hold the hosts to these numbers of cores, which they have before other programs."""
        groups = CpuGroups.find(Namespaces(self.cluster.folder).group_name)
        assert groups is not None
        name, most = ("cpu.shares", 262144) if groups.version == 1 else ("cpu.weight", 10000)
        (groups.folder / name).write_text(str(most))
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
        return self.bed.scratch / "blocks.json"

    def blocks(self) -> list[dict[str, Any]]:
        """Return the blocks that a script has written."""
        return list(json.loads(self.result.read_text(encoding="utf-8")))

    def train(self, *options: str, **script: Any) -> tuple[list[dict[str, Any]], list[Record]]:
        """Train with ours; return the blocks, and what the run has said of its input."""
        _, *training = self.script("read_ours", **script)
        options = ("--checkpoint-every", "0", *options)
        with OURS.job(self.bed, Order({self.trains: 1}, training, options=options)) as job:
            job.wait(lambda: job.ended() == 0, _LIMIT_S, "the end")
            return self.blocks(), job.events("input")

    def on(self, host: str, words: Sequence[str], **variables: str) -> list[str]:
        """Return the words of a command that runs on a host, within its cores."""
        given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        command = ["env", *(f"{name}={value}" for name, value in given.items()), *words]
        return ["ssh", "-F", str(self.cluster.ssh_config), host, shlex.join(command)]

    def call(self, words: Sequence[str], **variables: str) -> str:
        """Run a command on the training host; return what it printed."""
        done = subprocess.run(
            self.on(self.trains, words, **variables),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RunError(f"{words[1]}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    def read_on_trains(self, words: Sequence[str], **variables: str) -> list[dict[str, Any]]:
        """Run the script of a peer on the training host; return its blocks."""
        self.result.unlink(missing_ok=True)
        self.call(words, **variables)
        return self.blocks()


def with_ray_data(hosts: Hosts) -> list[dict[str, Any]]:
    """Read with Ray Data on both hosts."""
    ray = VirtualRay(hosts.cluster, hosts.bed.scratch / "ray", cpus=1)
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
    """Something that is tried against a wait for data.

    Attributes:
        what: what is done, as on the command line.
        said: whether the run says to do so.
        helped: whether the input host reads.
        script: options of the script that change; None: without the option.
        cores: of the training host and of the input host.
        rate: of the links of the hosts.
    """

    what: str
    said: bool = False
    helped: bool = False
    script: Mapping[str, Any] = field(default_factory=dict)
    cores: tuple[float, float] = (1.0, 1.0)
    rate: str = "1gbit"


@dataclass(frozen=True)
class Bound:
    """Something that training may wait for, and what is tried against it.

    Attributes:
        name: what it waits for.
        found: name of that in the events of the run.
        script: options of the script.
        trials: what is tried.
        helped: whether an input host reads from the beginning.
        rate: of the links of the hosts.
    """

    name: str
    found: str
    script: Mapping[str, Any]
    trials: tuple[Trial, ...]
    helped: bool = False
    rate: str = "1gbit"


_SLOW = "13mbit"
"""A batch takes 120 ms over this link: longer than a step of 80 ms, and less than the step and the
reading of a rank alone, beyond which the link would not be used."""
BOUNDS = (
    Bound(
        "decoding",
        "cores",
        {"transform_ms": 2 * AS_HEAVY_MS, "num_workers": 1},
        (
            Trial("--input-hosts", said=True, helped=True),
            Trial("num_workers=3", script={"num_workers": 3}),
        ),
    ),
    Bound(
        "storage",
        "storage",
        {"wait_ms": 2 * AS_HEAVY_MS, "num_workers": 1},
        (
            Trial("num_workers=2", said=True, script={"num_workers": 2}),
            Trial("twice the cores", cores=(2.0, 1.0)),
        ),
    ),
    Bound(
        "link",
        "link",
        {"transform_ms": 0.4 * AS_HEAVY_MS, "noise": True, "num_workers": 0},
        (
            Trial("num_workers=1", said=True, helped=True, script={"num_workers": 1}, rate=_SLOW),
            Trial("cropped pictures", said=True, helped=True, script={"side": 32}, rate=_SLOW),
            Trial("a link of 1 Gbit/s", said=True, helped=True),
            Trial("an input host of two cores", helped=True, cores=(1.0, 2.0), rate=_SLOW),
        ),
        helped=True,
        rate=_SLOW,
    ),
    Bound(
        "nothing",
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
_ALONE_S = 4.0
"""How long ``hvd-elastic bench input`` reads [s]."""


def measure_words(bounds: Sequence[str], hosts: Hosts, say: Say) -> Iterator[dict[str, Any]]:
    """Yield what runs say that they wait for, and the throughput with what is tried."""
    for bound in BOUNDS:
        if bound.name not in bounds:
            continue
        before, said = _run(hosts, bound, Trial("", helped=bound.helped, rate=bound.rate))
        last = said[-1] if said else {"bound": "", "reason": "nothing was said"}
        say(f"{bound.name}: {last['reason']}")
        yield {
            "bound": bound.name,
            "found": last["bound"],
            "right": last["bound"] == bound.found,
            "said": last["reason"],
            "alone": _alone(hosts, bound),
            "examples_per_s": before,
        }
        for trial in bound.trials:
            after, _ = _run(hosts, bound, trial)
            say(f"{bound.name}, {trial.what}: {after / before:.2f} of the throughput")
            yield {
                "bound": bound.name,
                "tried": trial.what,
                "as_said": trial.said,
                "examples_per_s": after,
                "of_before": round(after / before, 2),
            }


def _options(bound: Bound, trial: Trial) -> dict[str, Any]:
    usual = {"step_ms": STEP_MS, "batch": BATCH, "only": True, "steps": WORDS_STEPS}
    script: dict[str, Any] = {**usual, **bound.script, **trial.script}
    return {name: value for name, value in script.items() if value is not None}


def _run(hosts: Hosts, bound: Bound, trial: Trial) -> tuple[float, list[Record]]:
    """Return the throughput, and what the run has said of its input."""
    hosts.give_cores(*trial.cores)
    for host in (hosts.trains, hosts.reads):
        limit_link(hosts.cluster, host, parse_rate(trial.rate).bits_per_s)
    options = ["--input-hosts", hosts.reads] if trial.helped else []
    (block,), said = hosts.train(*options, **_options(bound, trial))
    return round(BATCH * WORDS_STEPS / block["seconds"], 1), said


def _alone(hosts: Hosts, bound: Bound) -> str:
    """Return what ``hvd-elastic bench input`` says of the loader on the training host."""
    hosts.give_cores(1.0, 1.0)
    script = hosts.script("read_ours", **_options(bound, Trial("")))
    words = [*OUR_PROGRAM, "bench", "input", "--seconds", f"{_ALONE_S:g}", "--json", "--", *script]
    found = json.loads(hosts.call(words))
    feeds_ms = 1000 * found["batch_size"] / found["examples_per_s"]
    return f"feeds steps of {feeds_ms:.0f} ms, limited by {found['bound']}"


@contextlib.contextmanager
def two_hosts(rounds: int) -> Iterator[Hosts]:
    """Make the hosts for the length of the block.

    Raises:
        UsageError: cores cannot be held here.
    """
    if CpuGroups.find("probe") is None or os.geteuid() != 0:
        raise UsageError(
            "cores of hosts are held by control groups: run it as root, where they are"
        )
    with make_testbed(2, cpus=TRAINS_CORES) as bed:
        hosts = Hosts(bed, rounds)
        hosts.give_cores(TRAINS_CORES, READS_CORES)
        yield hosts


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure the parts that were asked for."""
    check_names("--parts", options.parts, PARTS)
    check_names("--ways", options.ways, WAYS)
    check_names("--bounds", options.bounds, [bound.name for bound in BOUNDS])
    load_before = os.getloadavg()
    body: dict[str, Any] = {}
    if {"throughput", "overhead"} & {*options.parts}:
        with two_hosts(options.rounds) as hosts:
            if "throughput" in options.parts:
                body["throughput"] = measure_throughput(options, hosts, say)
            if "overhead" in options.parts:
                body["overhead"] = measure_overhead(hosts, say)
    if "words" in options.parts:
        with two_hosts(1) as hosts:
            body["words"] = [*measure_words(options.bounds, hosts, say)]
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
    bounds = [bound.name for bound in BOUNDS]
    told = f"what training waits for in `words`, of {', '.join(bounds)}"
    parser.add_argument("--bounds", type=names, default=bounds, help=told)
    parser.add_argument("--rounds", type=at_least_one, default=12, help="pairs of blocks (12)")
    told = "price of the training host per hour (3)"
    parser.add_argument("--price-trains", type=float, default=3.0, help=told)
    told = "price of the input host per hour (0.4)"
    parser.add_argument("--price-reads", type=float, default=0.4, help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
