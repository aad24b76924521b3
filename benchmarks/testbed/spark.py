"""A standalone Spark cluster on virtual hosts: the master here, a worker on each host."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
from typing_extensions import Self

from hvd_elastic.virtual import VirtualCluster

START_S = 300.0
"""Time limit for the start of a daemon [s]."""
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
MARK = "SPARK_CLUSTER"
"""Variable of all its processes, with its folder."""


class SparkCluster:
    """All hosts of a virtual cluster, or some of them, as Spark workers.

    Args:
        cluster: the virtual hosts.
        folder: folder that they share with this machine, for logs and Spark's files.
        cores: cores of each worker, as Spark counts them.
    """

    def __init__(self, cluster: VirtualCluster, folder: Path, cores: int = 1) -> None:
        import pyspark

        self.cluster, self.folder, self._cores = cluster, folder, cores
        self._home = Path(pyspark.__file__).parent
        self._address = cluster.leader_address
        self._port = _free_port(self._address)
        self._processes: list[subprocess.Popen[bytes] | subprocess.Popen[str]] = []
        (folder / "log").mkdir(parents=True)

    @property
    def url(self) -> str:
        """Address of the master, for a session."""
        return f"spark://{self._address}:{self._port}"

    @property
    def address(self) -> str:
        """Return the address of the driver, which runs on this machine."""
        return self._address

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start the master."""
        master = ("--host", self._address, "--port", str(self._port), "--webui-port", "0")
        self._processes.append(
            subprocess.Popen(
                self._command(MASTER, *master),
                env=self._environment(self._address),
                stdout=self._log("master"),
                stderr=subprocess.STDOUT,
            )
        )
        self._wait_for_log("master", "New state: ALIVE")

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the master, the workers and their executors."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder):
                    process.kill()
        for started in self._processes:
            started.kill()
            started.wait()

    def start_worker(self, host: str) -> None:
        """Start the worker of a host; wait until it is registered."""
        address = self.cluster.address(host)
        before = self._registered()
        worker = (
            *("--host", address, "--cores", str(self._cores), "--memory", "1g"),
            *("--work-dir", "/data/spark-work", "--webui-port", "0", self.url),
        )
        self._processes.append(
            self.cluster.popen_on(
                host,
                self._command(WORKER, *worker),
                env=self._environment(address),
                stdout=self._log(host),
                stderr=subprocess.STDOUT,
            )
        )
        deadline = time.monotonic() + START_S
        while self._registered() == before:
            assert time.monotonic() < deadline, self._read_log(host)
            time.sleep(0.1)

    def executors(self, host: str) -> list[psutil.Process]:
        """Return the executors (Java processes) of a host."""
        found = []
        for pid in self.cluster.pids(host):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def _registered(self) -> int:
        return self._read_log("master").count("Registering worker")

    def _command(self, name: str, *arguments: str) -> list[str]:
        return [str(self._home / "bin" / "spark-class"), name, *arguments]

    def _environment(self, address: str) -> dict[str, str]:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "HOROVOD_", "SPARK"))
        }
        return {
            **kept,
            "SPARK_HOME": str(self._home),
            "SPARK_LOCAL_IP": address,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -Dspark.worker.timeout=10",
            "PYSPARK_PYTHON": sys.executable,
            MARK: str(self.folder),
        }

    @property
    def driver_environment(self) -> dict[str, str]:
        """Return the environment of a program with a session on this cluster."""
        own = {"SPARK_URL": self.url, "SPARK_LOCAL_IP": self._address}
        return {**os.environ, "PYSPARK_PYTHON": sys.executable, **own}

    def _log(self, name: str) -> int:
        return os.open(self.folder / "log" / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _read_log(self, name: str) -> str:
        path = self.folder / "log" / name
        return path.read_text(errors="replace") if path.exists() else ""

    def _wait_for_log(self, name: str, words: str) -> None:
        deadline = time.monotonic() + START_S
        while words not in self._read_log(name):
            assert time.monotonic() < deadline, self._read_log(name)
            time.sleep(0.1)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])
