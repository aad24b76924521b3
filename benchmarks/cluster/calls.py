"""Times a command that does nothing on many hosts, by ``runclust`` and by its peers."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.cluster.calling import timed_call
from benchmarks.testbed.figures import Figure, Result, conditions, figure, ratio
from hvd_elastic.errors import UsageError
from hvd_elastic.virtual import VirtualCluster

__all__ = ["measure_calls"]

OURS, PEER = "runclust", "pdsh"
KINDS = {
    OURS: "a connection, a login and a Python for each host",
    PEER: "an ssh for each host, 64 at a time, with OpenSSH's own choice of key exchange",
    "clush": "the same",
}


def measure_calls(hosts: int, rounds: int, say: Callable[[str], None]) -> Result:
    """Measure each kind once in every round.

    Args:
        hosts: how many, each an sshd of this machine, 1 to 250.
        rounds: how often.
        say: told every figure.

    Raises:
        UsageError: there is no ssh.
    """
    ssh = shutil.which("ssh")
    if ssh is None:
        raise UsageError("ssh is not installed. Install it: apt install openssh-client")
    load_before = os.getloadavg()
    missing = [kind for kind in (PEER, "clush") if shutil.which(kind) is None]
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    leader_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with (
        tempfile.TemporaryDirectory(prefix="hvd_elastic-calls-") as folder,
        VirtualCluster.up(hosts, 1, loopback=True) as cluster,
    ):
        wrapper = Path(folder, "ssh")
        config = Path(folder, "config")
        lines = cluster.ssh_config.read_text().splitlines(keepends=True)
        config.write_text("".join(line for line in lines if "KexAlgorithms" not in line))
        wrapper.write_text(f'#!/bin/sh\nexec {ssh} -F {config} "$@"\n')
        wrapper.chmod(0o755)
        names = ",".join(cluster.hosts)
        program = "from hvd_elastic.cli.start import runclust; runclust()"
        commands = {
            OURS: [sys.executable, "-c", program, str(cluster.hostfile), "true"],
            PEER: ["pdsh", "-f", "64", "-R", "ssh", "-w", names, "true"],
            "clush": ["clush", "-f", "64", "-w", names, "true"],
        }
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "HVD_ELASTIC_HOME": folder, "PATH": path}
        for _ in range(rounds):
            for kind in (kind for kind in KINDS if kind not in missing):
                before = _children_s()
                samples[kind].append(timed_call(commands[kind], environment)[0])
                leader_s[kind].append(_children_s() - before)
                say(f"{kind}: {samples[kind][-1]:.3f} s")
    note = f"{hosts} hosts, each an sshd of this machine: the hosts' work shares its cores."
    note += f" Not installed: {', '.join(missing)}." if missing else ""
    figures = {kind: figure(taken) for kind, taken in samples.items()}
    leader = {kind: figure(taken) for kind, taken in leader_s.items()}
    return Result(
        "cluster_calls",
        conditions("virtual hosts (loopback)", note, load_before),
        {"calls": figures, "leader_processor_s": leader},
        [_text(figures, leader)],
    )


def _children_s() -> float:
    """Processor time of all commands that were run, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _text(figures: dict[str, Figure], leader: dict[str, Figure]) -> str:
    lines = [f"{kind:20} {figures[kind]}  ({meaning})" for kind, meaning in KINDS.items()]
    share = ratio(figures[OURS], figures[PEER])
    if share is not None:
        lines.append(f"runclust takes {share:.2f} of what pdsh does (wanted: at most 0.25)")
    for kind, each in leader.items():
        lines.append(f"{kind:20} {each}  of the leader's processors")
    return "\n".join(lines)
