"""Measures a command that does nothing on many hosts, with ``runclust`` and its peers."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.testbed.command import Say
from benchmarks.testbed.figures import Figure, Result, conditions, figure, ratio
from benchmarks.testbed.hosts import write_ssh
from hvd_elastic.errors import RunError
from hvd_elastic.virtual import VirtualCluster

OURS, PEER = "runclust", "pdsh"
KINDS = {
    OURS: "a connection, a login and a Python for each host",
    PEER: "an ssh for each host, 64 at a time, with OpenSSH's own choice of key exchange",
    "clush": "the same",
}
_LIMIT_S = 300.0
"""Time limit of one call."""


def our_tool(program: str, *arguments: str) -> list[str]:
    """Return the command line of one of our programs, run with this Python."""
    text = f"from hvd_elastic.cli.start import {program}; {program}()"
    return [sys.executable, "-c", text, *arguments]


def timed_call(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, str]:
    """Run a command without input; return its duration [s] and its stderr.

    Raises:
        RunError: it failed; contains the end of its stderr.
        subprocess.TimeoutExpired: it took too long.
    """
    begun = time.monotonic()
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode != 0:
        raise RunError(f"'{shlex.join(command)[:80]}…' failed: {done.stderr[-500:]}")
    return time.monotonic() - begun, done.stderr


def measure_calls(hosts: int, rounds: int, say: Say) -> Result:
    """Measure each tool once in every round.

    Args:
        hosts: number of hosts, each an sshd of this machine, 1 to 250.
        rounds: number of rounds.
        say: called with every figure.

    Raises:
        UsageError: ssh is not installed.
    """
    load_before = os.getloadavg()
    there = [kind for kind in KINDS if kind == OURS or shutil.which(kind) is not None]
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    leader_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with (
        tempfile.TemporaryDirectory(prefix="hvd_elastic-calls-") as folder,
        VirtualCluster.up(hosts, 1, loopback=True) as cluster,
    ):
        config = Path(folder, "config")
        lines = cluster.ssh_config.read_text().splitlines(keepends=True)
        config.write_text("".join(line for line in lines if "KexAlgorithms" not in line))
        write_ssh(Path(folder, "ssh"), config)
        names = ",".join(cluster.hosts)
        commands = {
            OURS: our_tool("runclust", str(cluster.hostfile), "true"),
            PEER: ["pdsh", "-f", "64", "-R", "ssh", "-w", names, "true"],
            "clush": ["clush", "-f", "64", "-w", names, "true"],
        }
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "HVD_ELASTIC_HOME": folder, "PATH": path}
        for _ in range(rounds):
            for kind in there:
                before = _children_s()
                samples[kind].append(timed_call(commands[kind], environment)[0])
                leader_s[kind].append(_children_s() - before)
                say(f"{kind}: {samples[kind][-1]:.3f} s")
    note = f"{hosts} hosts, each an sshd of this machine: the hosts' work shares its cores."
    missing = ", ".join(kind for kind in KINDS if kind not in there)
    note += f" Not installed: {missing}." if missing else ""
    figures = {kind: figure(taken) for kind, taken in samples.items()}
    leader = {kind: figure(taken) for kind, taken in leader_s.items()}
    return Result(
        "cluster_calls",
        conditions("virtual hosts (loopback)", note, load_before),
        {"calls": figures, "leader_processor_s": leader},
        [_text(figures, leader)],
    )


def _children_s() -> float:
    """Return the processor time of all finished commands and their children [s]."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _text(figures: dict[str, Figure], leader: dict[str, Figure]) -> str:
    lines = [f"{kind:20} {figures[kind]}  ({meaning})" for kind, meaning in KINDS.items()]
    share = ratio(figures[OURS], figures[PEER])
    if share is not None:
        lines.append(f"runclust takes {share:.2f} of what pdsh does (wanted: at most 0.25)")
    lines += [f"{kind:20} {each}  of the leader's processors" for kind, each in leader.items()]
    return "\n".join(lines)
