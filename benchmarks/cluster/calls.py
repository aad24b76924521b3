"""What a command that does nothing takes on many hosts: cold, through kept agents, and by peers."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.cluster.calling import LIMIT_S, timed_call
from benchmarks.testbed.figures import Figure, Result, conditions, figure, ratio
from hvd_elastic.errors import UsageError
from hvd_elastic.virtual import VirtualCluster

__all__ = ["measure_calls"]

OURS, PEER = "runclust, kept", "ssh, ControlPersist"
COLD, COLD_PEER = "runclust, cold", "pdsh"
COLD_KINDS = (COLD, COLD_PEER, "clush")
KINDS = {
    COLD: "a connection, a login and a Python for each host",
    COLD_PEER: "an ssh for each host, 64 at a time, with OpenSSH's own choice of key exchange",
    "clush": "the same",
    OURS: "runclust --keep, the calls after the first",
    PEER: "an ssh for each host, all at once, through masters that are there",
    "shells here": "sh -c true as often, one after the other: what the hosts' part costs at least",
    "Python": "python -c pass",
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
    if shutil.which("ssh") is None:
        raise UsageError("ssh is not installed. Install it: apt install openssh-client")
    load_before = os.getloadavg()
    missing = [kind for kind in COLD_KINDS[1:] if shutil.which(kind) is None]
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    leader_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with (
        tempfile.TemporaryDirectory(prefix="hvd_elastic-calls-") as folder,
        VirtualCluster.up(hosts, 1, loopback=True) as cluster,
    ):
        program = "from hvd_elastic.cli.start import runclust; runclust()"
        ours = [sys.executable, "-c", program]
        call = [str(cluster.hostfile), "true"]
        options = f"-F {cluster.ssh_config} -o ControlMaster=auto -o ControlPath={folder}/%C"
        each = " ".join(shlex.quote(host) for host in cluster.hosts)
        ssh = f"ssh {options} -o ControlPersist={LIMIT_S:.0f} -n"
        peer = ["sh", "-c", f"for host in {each}; do {ssh} $host true & done; wait"]
        leave = ["sh", "-c", f"for host in {each}; do ssh {options} -O exit $host; done"]
        wrapper = Path(folder, "ssh")
        config = Path(folder, "config")
        lines = cluster.ssh_config.read_text().splitlines(keepends=True)
        config.write_text("".join(line for line in lines if "KexAlgorithms" not in line))
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
        wrapper.chmod(0o755)
        names = ",".join(cluster.hosts)
        commands = {
            COLD: [*ours, *call],
            COLD_PEER: ["pdsh", "-f", "64", "-R", "ssh", "-w", names, "true"],
            "clush": ["clush", "-f", "64", "-w", names, "true"],
            OURS: [*ours, *call],
            PEER: peer,
            "shells here": ["sh", "-c", f"for host in {each}; do sh -c true; done"],
            "Python": [sys.executable, "-c", "pass"],
        }
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "HVD_ELASTIC_HOME": folder, "PATH": path}
        environment.pop("HVD_ELASTIC_KEEP", None)

        def take(kind: str) -> None:
            before = _children_s()
            samples[kind].append(timed_call(commands[kind], environment)[0])
            leader_s[kind].append(_children_s() - before)
            say(f"{kind}: {samples[kind][-1]:.3f} s")

        try:
            cold = [kind for kind in COLD_KINDS if kind not in missing]
            for _ in range(min(rounds, 2)):
                for kind in cold:
                    take(kind)
            timed_call([*ours, "--keep", f"{LIMIT_S:.0f}s", *call], environment)
            timed_call(peer, environment)
            for _ in range(rounds):
                for kind in [kind for kind in KINDS if kind not in COLD_KINDS]:
                    take(kind)
        finally:
            timed_call([*ours, "--no-keep", *call], environment)
            timed_call(leave, environment)
    note = f"{hosts} hosts, each an sshd of this machine: the hosts' work shares its cores."
    note += f" Not installed: {', '.join(missing)}." if missing else ""
    figures = {kind: figure(taken) for kind, taken in samples.items()}
    leader = {kind: figure(leader_s[kind]) for kind in COLD_KINDS}
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
    share = ratio(figures[COLD], figures[COLD_PEER])
    if share is not None:
        lines.append(f"cold, runclust takes {share:.2f} of what pdsh does (wanted: at most 0.25)")
    for kind, each in leader.items():
        lines.append(f"{kind:20} {each}  of the leader's processors")
    times = ratio(figures[PEER], figures[OURS])
    if times is not None:
        lines.append(f"ControlPersist takes {times:.1f} times as long as what is kept (wanted: 10)")
    return "\n".join(lines)
