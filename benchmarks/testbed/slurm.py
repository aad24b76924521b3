"""A Slurm of one's own on virtual hosts: slurmctld here, a slurmd on each host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

import psutil
from typing_extensions import Self

from hvd_elastic.install.prerequisites import find_program
from hvd_elastic.virtual import VirtualCluster

START_S = 60.0
DOWN_AFTER_S = 10
"""Slurm's own time limit for a silent slurmd [s]; its default is 300."""

CONFIG = """\
ClusterName=virtual
SlurmctldHost={name}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
SlurmctldPort={port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={down_after_s}
KillWait=15
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Return the programs of Slurm that this machine lacks."""
    programs = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
    return [name for name in programs if find_program(name) is None]


class SlurmCluster:
    """All hosts of a virtual cluster as nodes of one partition.

    The first one has two GPUs and the others have one, as far as Slurm is concerned.

    Args:
        cluster: the virtual hosts.
        folder: folder that they share with this machine, for configuration, state and logs.
        cpus: CPUs of each node, as Slurm counts them.
    """

    def __init__(self, cluster: VirtualCluster, folder: Path, cpus: int = 2) -> None:
        self.cluster = cluster
        self.folder = folder
        for name in ("state", "spool", "log", "munge"):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o755)
        port = _free_port()
        config = CONFIG.format(
            name=socket.gethostname(),
            address=cluster.leader_address,
            folder=folder,
            port=port,
            slurmd_port=port + 1,
            down_after_s=DOWN_AFTER_S,
        )
        devices = ""
        for number in range(2):
            (folder / f"gpu{number}").touch()  # in place of a device
        for number, host in enumerate(cluster.state.hosts):
            gpus = 1 if number else 2
            config += (
                f"NodeName={host.name} NodeAddr={host.address} NodeHostname={host.name} "
                f"CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus}\n"
            )
            devices += f"NodeName={host.name} Name=gpu File={folder}/gpu[0-{gpus - 1}]\n"
        (folder / "gres.conf").write_text(devices, encoding="utf-8")
        self.config = folder / "slurm.conf"
        self.config.write_text(config, encoding="utf-8")
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all daemons, and wait until Slurm gives out the nodes."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all daemons, and everything that was started in this Slurm."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.call("scancel", "--me", check=False)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == str(self.config):
                    process.kill()
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a user's shell, in which Slurm's commands find this cluster."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**kept, "SLURM_CONF": str(self.config)}

    def call(
        self, *command: str, check: bool = True, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands."""
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**self.environment, **(env or {})},
            timeout=START_S,
            cwd=self.folder,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    @contextlib.contextmanager
    def allocation(self, *options: str) -> Iterator[dict[str, str]]:
        """Have this process be in an allocation, as a shell of salloc is; yields its variables."""
        told = self.folder / "allocation"
        told.unlink(missing_ok=True)
        script = f"env -0 > {told}.new && mv {told}.new {told} && exec sleep 1000"
        process = subprocess.Popen(
            ["salloc", "--quiet", *options, "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            env=self.environment,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + START_S
            while not told.exists():
                assert process.poll() is None, "salloc has failed"
                assert time.monotonic() < deadline, "no allocation"
                time.sleep(0.02)
            pairs = (each.split("=", 1) for each in told.read_text().split("\0") if each)
            found = {name: value for name, value in pairs if name.startswith("SLURM_")}
            with patch.dict(os.environ, found):
                yield found
        finally:
            # The allocation ends with the command; salloc itself does not end at SIGTERM.
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.wait(START_S)

    def jobs(self, name: str, *options: str) -> list[str]:
        """Return the numbers of the jobs of that name."""
        return self.call("squeue", "-h", f"--name={name}", "-o%A", *options).stdout.split()

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        lines = self.call("sinfo", "-h", "-N", "-o", "%N %T").stdout.split("\n")
        return dict(line.split() for line in lines if line)

    def start_slurmd(self, host: str) -> None:
        """Start the slurmd of a host that has (again) booted."""
        slurmd = find_program("slurmd")
        assert slurmd is not None
        command = [slurmd, "-f", str(self.config)]
        done = self.cluster.run_on(host, command, env=self.environment, timeout=START_S)
        assert done.returncode == 0, done.stderr

    def wait_idle(self, hosts: list[str]) -> None:
        """Wait until Slurm gives out these nodes."""
        deadline = time.monotonic() + START_S
        while not all(self.states().get(host) == "idle" for host in hosts):
            assert time.monotonic() < deadline, self.states()
            time.sleep(0.1)

    def _start(self) -> None:
        munge = self.folder / "munge"
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={munge / name}" for option, name in files.items()]
        self._run("munged", "--foreground", "--force", f"--key-file={key}", *options)
        deadline = time.monotonic() + START_S
        while not (munge / "socket").exists():
            assert time.monotonic() < deadline, "munged does not start"
            time.sleep(0.02)
        self._run("slurmctld", "-D", "-c", "-f", str(self.config))
        for host in self.cluster.hosts:
            self.start_slurmd(host)
        self.wait_idle(self.cluster.hosts)

    def _run(self, program: str, *options: str) -> None:
        found = find_program(program)
        assert found is not None, program
        with (self.folder / "log" / f"{program}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [found, *options], stdout=output, stderr=output, env=self.environment
                )
            )


def _free_port() -> int:
    """Return a port that is free together with the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError):
                second.bind(("", port + 1))
                return port
