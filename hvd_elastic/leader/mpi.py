"""Runs a static, not elastic, job with Open MPI: ``hvd-elastic run --mpi``.

MPI ends the whole job when one rank is lost. This mode is for sites whose network is fast only
with MPI, and for scripts that use mpi4py beside Horovod.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.hostfile_watch import read_hosts
from hvd_elastic.leader.spec import RunSpec, forwarded_environment

# Variables that make Horovod use MPI for control messages and for data on the CPU.
_FOR_MPI = {
    "HOROVOD_CONTROLLER": "mpi",
    "HOROVOD_CPU_OPERATIONS": "mpi",
    "PYTHONFAULTHANDLER": "1",  # a rank that is killed by a signal prints its Python stack
}


def mpirun_command(
    spec: RunSpec, hosts: list[Host], hostfile: str, variables: list[str], *, root: bool
) -> list[str]:
    """Return the command line of ``mpirun``.

    Environment variables are named without their values, so that no value shows in ``ps``; Open
    MPI sends the values through its own channel.

    Args:
        hostfile: path of a file that lists these hosts in Open MPI's format.
        variables: names of the environment variables to forward.
        root: whether root runs the job, which Open MPI refuses without a flag.
    """
    ssh = ["ssh", "-o", "BatchMode=yes"]
    if spec.ssh_config is not None:
        ssh += ["-F", spec.ssh_config]
    command = ["mpirun", "--hostfile", hostfile]
    command += ["-np", str(spec.np or sum(host.slots for host in hosts))]
    command += ["--wdir", spec.cwd, "--bind-to", "none", "--map-by", "slot"]
    command += ["--mca", "plm_rsh_agent", shlex.join(ssh), "--mca", "pml", "ob1"]
    # UCX and openib search for hardware for seconds and then print warnings.
    command += ["--mca", "btl", "^openib"]
    if spec.interface is not None:
        for layer in ("btl_tcp_if_include", "oob_tcp_if_include"):
            command += ["--mca", layer, spec.interface]
    if root:
        command.append("--allow-run-as-root")
    for name in variables:
        command += ["-x", name]
    return [*command, *spec.command]


def run_mpi(spec: RunSpec, environment: Mapping[str, str]) -> int:
    """Run the job to its end and return mpirun's exit status.

    Raises:
        RunError: there is no ``mpirun``.
        HostfileError: the hostfile cannot be read.
    """
    if shutil.which("mpirun") is None:
        raise RunError(
            "--mpi needs Open MPI's mpirun, which is not on PATH. Install it on every host: "
            "apt-get install openmpi-bin libopenmpi-dev, then build Horovod again: "
            "hvd-elastic build-horovod"
        )
    hosts = [*read_hosts(spec.hostfile_path, spec.slots, spec.exclude)]
    environment = {**spec.environment(environment, "mpi"), **_FOR_MPI}
    forwarded = forwarded_environment(environment)
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-") as folder:
        hostfile = Path(folder) / "hosts"
        lines = [
            f"{f'{host.user}@' if host.user else ''}{host.name} slots={host.slots}\n"
            for host in hosts
        ]
        hostfile.write_text("".join(lines), encoding="utf-8")
        command = mpirun_command(
            spec, hosts, str(hostfile), sorted(forwarded), root=os.geteuid() == 0
        )
        process = subprocess.Popen(command, env=environment)
        before = {
            # mpirun ends its ranks on these signals, and needs the hostfile until then.
            number: signal.signal(number, lambda sent, _: process.send_signal(sent))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
