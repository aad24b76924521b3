"""Times a command that does nothing on many hosts, by ``runclust`` and by its peers."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_elastic.bench.cluster.calling import timed_call
from hvd_elastic.bench.figures import Figure, conditions, figure, ratio, write_result
from hvd_elastic.errors import UsageError
from hvd_elastic.virtual import VirtualCluster

__all__ = ["measure_calls", "show_calls", "write_calls"]

OURS, PEER = "runclust", "pdsh"
KINDS = {
    OURS: "a connection, a login and a Python for each host",
    PEER: "an ssh for each host, 64 at a time, with OpenSSH's own choice of key exchange",
    "clush": "the same",
}


def measure_calls(hosts: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Times each kind once in every round; returns what :func:`show_calls` prints.

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
    return {
        "conditions": conditions("virtual hosts (loopback)", note, load_before),
        "figures": {kind: figure(taken) for kind, taken in samples.items()},
        "leader": {kind: figure(taken) for kind, taken in leader_s.items()},
    }


def _children_s() -> float:
    """Processor time of all commands that were run, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show_calls(result: dict[str, Any]) -> str:
    """The figures as lines of text, with the conditions below."""
    figures: dict[str, Figure] = result["figures"]
    lines = [f"{kind:20} {figures[kind]}  ({meaning})" for kind, meaning in KINDS.items()]
    share = ratio(figures[OURS], figures[PEER])
    if share is not None:
        lines.append(f"runclust takes {share:.2f} of what pdsh does (wanted: at most 0.25)")
    leader: dict[str, Figure] = result["leader"]
    for kind, each in leader.items():
        lines.append(f"{kind:20} {each}  of the leader's processors")
    return "\n".join([*lines, "", result["conditions"].sentence()])


def write_calls(result: dict[str, Any], path: Path) -> None:
    """Keeps the figures as JSON."""
    figures = {kind: asdict(each) for kind, each in result["figures"].items()}
    leader = {kind: asdict(each) for kind, each in result["leader"].items()}
    taken = {"calls": figures, "leader_processor_s": leader}
    write_result(path, "cluster_calls", result["conditions"], taken)
