"""Two clouds of virtual hosts: EC2 by moto, and the programs of the docs for ``command``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.testbed.cloud import Cloud
from hvd_elastic.virtual import VirtualCluster
from tests.paths import LIMIT_S, ROOT
from tests.waiting import until

__all__ = ["Ec2", "Market", "Rack"]

PROGRAMS = ROOT / "scripts/examples/rack"
_KEY = "test"


class Market:
    """A cloud, and how ``hvd-elastic cloud`` is told to use it.

    Args:
        cluster: its hosts, which are off until they are machines.
        home: folder of ours for the computer that asks.
        shared: folder that the machines see too.
    """

    provider: tuple[str, ...]
    """Options that name the provider."""
    machines: tuple[str, ...]
    """Options of ``cloud up`` beside them that say which machines, and how they are reached."""

    def __init__(self, cluster: VirtualCluster, home: Path, shared: Path) -> None:
        self.cluster, self.home, self.shared = cluster, home, shared
        self.ssh_config = home / "ssh_config"
        key = cluster.folder / "id_ed25519"
        self.ssh_config.write_text(
            f"Host *\n    IdentityFile {key}\n    IdentitiesOnly yes\n    ConnectTimeout 5\n"
        )
        self.settings: dict[str, float] = {}
        """Times of the product [s]."""
        Market.end_all(self)

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "HOROVOD_", "AWS_"))
        }
        kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
        kept |= {"HVD_ELASTIC_HOME": str(self.home), "PYTHONPATH": str(ROOT)}
        return kept | {f"HVD_ELASTIC_CLOUD_{k}_S": str(v) for k, v in self.settings.items()}

    def up_options(self, name: str, *more: str) -> list[str]:
        where = [*self.provider, *self.machines, "--ssh-config", str(self.ssh_config)]
        return ["up", name, *where, "--login", "root", *more]

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start ``hvd-elastic cloud``."""
        return subprocess.Popen(
            [sys.executable, "-m", "hvd_elastic.cli.app", "cloud", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            **options,
        )

    def call(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run ``hvd-elastic cloud`` to its end, and check its exit status."""
        process = self.start(*words)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == status, f"{words}: {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(words, status, out, err)

    def hosts_on(self) -> set[str]:
        """Return the virtual hosts that run: the truth about what costs money."""
        return {host for host in self.cluster.hosts if self.cluster.pids(host, system=True)}

    def wait_hosts(self, wanted: Callable[[set[str]], bool]) -> set[str]:
        """Wait until the hosts that run are as wanted."""
        deadline = time.monotonic() + LIMIT_S
        while not wanted(found := self.hosts_on()):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found

    def start_bystander(self, **tags: str) -> str:
        """Start a machine that is not ours; return its host."""
        raise NotImplementedError

    def end_by_hand(self, host: str) -> None:
        """End a machine as somebody does in the console of the cloud."""
        raise NotImplementedError

    def wait_ended(self) -> None:
        """Wait until what shuts down is off; it costs nothing, but its host still runs."""

    def end_all(self) -> None:
        """End all machines, and forget all clouds, for the next test."""
        shutil.rmtree(self.home / "clouds", ignore_errors=True)
        self.settings |= {"SETTLE": 3.0, "LEASE": 120.0, "START_LIMIT": LIMIT_S}


class Ec2(Market):
    """Amazon's EC2, by moto and the front of ours."""

    provider = ("--provider", "aws", "--region", "us-east-1")
    machines = (
        *("--type", "g5.xlarge", "--zone", "us-east-1a", "--image", "ami-12345678"),
        *("--key-name", _KEY),
    )

    def __init__(self, cluster: VirtualCluster, home: Path, shared: Path, cloud: Cloud) -> None:
        super().__init__(cluster, home, shared)
        self.cloud = cloud
        self.without: tuple[str, ...] = ()
        """Variables that the user has not set."""
        cloud.add_key(_KEY, (cluster.folder / "id_ed25519.pub").read_text())

    @property
    def environment(self) -> dict[str, str]:
        given = {**super().environment, **self.cloud.environment}
        return {name: text for name, text in given.items() if name not in self.without}

    def start_bystander(self, **tags: str) -> str:
        return self.cloud.start_bystander(**{f"hvd-elastic:{k}": v for k, v in tags.items()}).host

    def end_by_hand(self, host: str) -> None:
        self.cloud.end_by_hand(next(each for each in self.cloud.live() if each.host == host))

    def wait_ended(self) -> None:
        until(lambda: not self.cloud.ending(), "the end of what shuts down")

    def end_all(self) -> None:
        super().end_all()
        self.cloud.reset()
        self.cloud.bodies.fault, self.without = "", ()


class Rack(Market):
    """The hosts of a virtual cluster, by the programs that the docs show."""

    machines = ("--type", "small")

    def __init__(self, cluster: VirtualCluster, home: Path, shared: Path) -> None:
        super().__init__(cluster, home, shared)
        self.programs = home / "programs"
        shutil.copytree(PROGRAMS, self.programs, symlinks=True)
        self.provider = ("--provider", "command", "--programs", str(self.programs))
        self.records = home / "rack.json"
        for host in cluster.hosts:
            cluster.crash(host)

    @property
    def environment(self) -> dict[str, str]:
        rack = {"RACK": self.cluster.name, "RACK_RECORDS": str(self.records)}
        return {**super().environment, **rack}

    def start_bystander(self, **tags: str) -> str:
        asked = {"type": "small", "zone": "", "spot": False, "count": 1, "token": "theirs"}
        asked |= {"tags": {"token": "theirs", **tags}, "user_data": "", "max_s": 3600}
        return str(self._program("start", asked)["machines"][0]["host"])

    def end_by_hand(self, host: str) -> None:
        self.cluster.crash(host)

    def end_all(self) -> None:
        super().end_all()
        for host in self.hosts_on():
            self.cluster.crash(host)
        self.records.unlink(missing_ok=True)

    def _program(self, name: str, asked: dict[str, Any]) -> Any:
        done = subprocess.run(
            [self.programs / name],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)
