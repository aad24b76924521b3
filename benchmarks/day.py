"""A day of a lab in minutes: jobs, lost hosts, a killed daemon; and what the screens say meanwhile.

At each second, what ``hosts``, ``queue``, ``why`` and the page say is compared with the processes
on four virtual hosts, the grants and the leaders. Example: ``python benchmarks/day.py -v``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sharing.cluster import Cluster, virtual_hosts
from benchmarks.sharing.screens import LONGEST_S, Watch
from benchmarks.testbed.command import Say, at_least_one, run_benchmark
from benchmarks.testbed.figures import Result, conditions
from hvd_elastic.errors import HvdElasticError
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.virtual import VirtualCluster

HOSTS, SLOTS = 4, 2
_LIMITS = ("--failure-timeout", 2, "--leader-grace", 4)
"""Lost hosts are noticed soon, as the day is short."""
Act = tuple[float, str, Callable[[], object]]
"""When, as a part of the day; what; and what does it."""


def _acts(cluster: Cluster, hosts: VirtualCluster, day_s: float) -> Iterator[Act]:
    """Yield what happens, in order."""

    def submit(*arguments: object) -> Callable[[], object]:
        return lambda: cluster.call("submit", "--json", *arguments)

    def train(name: str, *arguments: object, epochs: int = 10_000) -> Callable[[], object]:
        script = ("--", sys.executable, cluster.script, "--epochs", epochs, "--random", 0.9)
        return submit("--name", name, *_LIMITS, *arguments, *script, "--max-batch", 512)

    def plain(name: str, part: float, *arguments: object) -> Callable[[], object]:
        words = ("--plain", *_LIMITS, "--name", name, *arguments, "--", "sleep")
        return submit(*words, f"{part * day_s:.1f}")

    def hostfile(*names: str) -> Callable[[], object]:
        text = "".join(f"{name} slots={SLOTS}\n" for name in names)
        return lambda: cluster.hostfile.write_text(text, encoding="utf-8")

    def of(name: str) -> str:
        """Return a host on which a job holds slots, else the last one."""
        queue = json.loads(cluster.call("queue", "--json"))
        held = [host for job in queue if job["name"] == name for host in job["hosts"]]
        return [*held, hosts.hosts[-1]][0]

    def without() -> None:
        gone = of("long")
        hostfile(*(name for name in hosts.hosts if name != gone))()

    def kill_daemon() -> None:
        pid = int(ClusterFolder(cluster.folder).daemon()["pid"])
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)

    hit: list[str] = []

    def hits(name: str, act: Callable[[str], None]) -> Callable[[], None]:
        def do() -> None:
            hit.append(of(name))
            act(hit[-1])

        return do

    broken = (sys.executable, "-c", "raise ValueError('broken at import')")
    yield 0.00, "a training job", train("first")
    yield 0.02, "a long command", plain("long", 0.3)
    yield 0.06, "an array of commands", plain("short", 0.02, "--array", "0-12")
    yield 0.10, "a job that fails", submit("--name", "broken", *_LIMITS, "--", *broken)
    yield 0.11, "a job after it", plain("never", 0.01, "--after", "ok:broken")
    yield 0.12, "a job after the long command", plain("later", 0.02, "--after", "ok:long")
    yield 0.16, "the host of the long command leaves the hostfile", without
    yield 0.18, "a training job of two slots or more", train("second", "--min-np", 2)
    yield 0.24, "an array of commands", plain("more", 0.03, "--array", "0-19")
    yield 0.36, "the host is back", hostfile(*hosts.hosts)
    yield 0.38, "a short training job", train("third", epochs=4)
    yield 0.42, "a host of the first job crashes", hits("first", hosts.crash)
    yield 0.48, "it boots", lambda: hosts.boot(hit[-1])
    yield 0.50, "the daemon is killed", kill_daemon
    yield 0.52, "the daemon is up again", cluster.start
    yield 0.55, "a cable is pulled", hits("second", hosts.cut)
    yield 0.63, "it is in again", lambda: hosts.heal(hit[-1])
    yield 0.66, "a job is cancelled", lambda: cluster.call("cancel", "second")
    yield 0.68, "a job is queued again", lambda: cluster.call("requeue", "first")
    yield (
        0.72,
        "commands that fail",
        submit(
            *("--plain", *_LIMITS, "--name", "fails", "--retries", 1, "--array", "0-2"),
            *("--", "sh", "-c", "sleep 1; echo no such data >&2; exit 3"),
        ),
    )
    yield 0.74, "commands", plain("last", 0.04, "--array", "0-9")
    yield 0.80, "the cluster is taken down", lambda: cluster.call("down")
    yield 0.84, "it is up again", cluster.start
    yield 0.94, "all jobs are cancelled", lambda: cluster.call("cancel", "1-99")


def _live_through(acts: list[Act], watch: Watch, day_s: float, say: Say) -> list[dict[str, Any]]:
    """Do what happens when it is time, and look at the screens each second; return mistakes."""
    problems = []
    while (at_s := time.time() - watch.began) < day_s:
        while acts and at_s >= acts[0][0] * day_s:
            _, what, act = acts.pop(0)
            say(f"{at_s:.0f} s: {what}")
            try:
                act()
            except (RuntimeError, HvdElasticError) as error:
                problems.append({"at_s": at_s, "what": what, "error": str(error)})
                say(f"{what}: {error}")
        for late in watch.look():
            say(f"{late.end_s:.0f} s: for {late.lasted_s:.1f} s, {late.what}: {late.words}")
        time.sleep(max(0.0, 1.0 - (time.time() - watch.began - at_s)))
    return problems


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Live through a day and return what the screens said that was not so."""
    load_before = os.getloadavg()
    day_s = 60.0 * options.minutes
    with contextlib.ExitStack() as stack:
        home = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home = home.absolute()
        home.mkdir(parents=True, exist_ok=True)
        hosts = stack.enter_context(virtual_hosts(HOSTS, SLOTS, home))
        text = "".join(f"{host} slots={SLOTS}\n" for host in hosts.hosts)
        cluster = Cluster(home, text, "--ssh-config", hosts.ssh_config)
        # The screens are read in this process.
        stack.enter_context(mock.patch.dict(os.environ, HVD_ELASTIC_HOME=str(home)))
        with cluster.up():
            watch = Watch(cluster, hosts)
            problems = _live_through([*_acts(cluster, hosts, day_s)], watch, day_s, say)
        jobs = sum(event["kind"] == "job_submitted" for event in cluster.queue_events())
    found = [
        {"what": each.what, "from_s": each.begin_s, "lasted_s": each.lasted_s, "words": each.words}
        for each in watch.all
        if each.lasted_s > 0
    ]
    longest = max((each.lasted_s for each in watch.all), default=0.0)
    day = {
        "minutes": options.minutes,
        "jobs": jobs,
        "looks": watch.looks,
        "contradictions": len(watch.all),
        "longer_than_3_s": sum(each.lasted_s > LONGEST_S for each in watch.all),
        "longest_s": longest,
    }
    note = "A contradiction that only one look saw lasted less than two looks are apart."
    taken = conditions(f"{HOSTS} virtual hosts of {SLOTS} slots", note, load_before)
    body = {"day": [day], "contradictions": found, "problems": problems}
    return Result("day", taken, body)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=at_least_one, default=10, help="length of the day (10)")
    told = "where to keep the queue and the runs (default: a folder that is removed)"
    parser.add_argument("--folder", type=Path, help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
