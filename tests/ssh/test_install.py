"""``hvd-elastic install`` and ``uninstall`` over hosts in namespaces, with a small environment."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.bench.digits_data import write_digits
from hvd_elastic.programs.environment import new_name
from hvd_elastic.virtual import VirtualCluster, netns
from tests.paths import ALL, COSTLY, LIMIT_S, ROOT
from tests.waiting import until

NO_NAMESPACES = netns.why_no_namespaces()
pytestmark = [
    pytest.mark.ssh,
    pytest.mark.root,
    pytest.mark.skipif(NO_NAMESPACES is not None, reason=NO_NAMESPACES or ""),
]
LEFT_OUT = "tensorflow" if importlib.util.find_spec("torch") else "torch"
"""The framework that is left out, since importing it takes long."""

SCRIPT = """
import torch
import hvd_elastic.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model)
data = torch.utils.data.TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
loader = hvd.DataLoader(data, 24)
@hvd.run
def train(state):
    for epoch in hvd.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    print(f"trained on {hvd.size()} ranks")
train(hvd.State(model=model, optimizer=optimizer))
"""


class Bed:
    """Three hosts with their own ``/tmp``, and an environment in ours."""

    def __init__(self, cluster: VirtualCluster, folder: Path) -> None:
        self.cluster = cluster
        self.prefix = folder / "its place" / "env"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(self.prefix)], check=True
        )
        site = self.prefix / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        # Packages that hosts have at the same path, and this one in its checkout, as with pip -e.
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not path.name.startswith((LEFT_OUT, "keras", "__", "hvd_elastic")):
                (site / path.name).symlink_to(path)
        (site / "checkout.pth").write_text(f"{ROOT}\n")
        self.large = site / "large.bin"
        self.large.write_bytes(os.urandom(12_000_000))
        self.environment = {**os.environ, "HVD_ELASTIC_HOME": str(folder / "home")}
        self.environment["XDG_CACHE_HOME"] = str(folder / "cache")  # has no wheel
        self.environment.pop("PYTHONPATH", None)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [str(self.prefix / "bin/python"), "-m", "hvd_elastic.cli.app", words[0]]
        return subprocess.Popen(
            [*command, str(self.cluster.hostfile), *words[1:], "--json", "--connect-timeout", "60"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
        )

    def __call__(self, *words: str, status: int = 0) -> list[dict[str, Any]]:
        """Return the results of the hosts, in order."""
        process = self.start(*words)
        out, err = process.communicate(timeout=200)
        assert process.returncode == status, (out, err)
        assert "Traceback" not in err
        found = [json.loads(line) for line in out.splitlines()]
        return sorted(
            (line for line in found if line["kind"] == "host"), key=lambda line: line["host"]
        )

    def on(self, number: int, command: str) -> str:
        """Return what a shell command prints on a host."""
        host, argv = self.cluster.hosts[number], ["sh", "-c", command]
        return self.cluster.run_on(
            host, argv, stdout=subprocess.PIPE, timeout=LIMIT_S
        ).stdout.strip()


def run_there(bed: Bed) -> None:
    """Train on the two hosts with what was installed."""
    script = ROOT / "scripts" / "examples" / "digits.py"
    data = bed.prefix.parents[1] / "data"
    write_digits(data)
    python = str(bed.prefix / "bin" / "python")
    only = ["--hosts", ",".join(bed.cluster.hosts[:2])]
    copy = [python, "-m", "hvd_elastic.cli.app", "cluster", "copy", str(bed.cluster.hostfile)]
    subprocess.run([*copy, f"{data}/", str(data), *only], env=bed.environment, check=True)
    hosts = data / "two hosts"
    hosts.write_text("\n".join(bed.cluster.hosts[:2]))
    run = [python, "-m", "hvd_elastic.cli.app", "run", "--hostfile", str(hosts), "--np", "2"]
    where = ["--ssh-config", str(bed.cluster.ssh_config)]
    train = ["--", "python", str(script), "--data", str(data), "--epochs", "1", "--quiet"]
    done = subprocess.run(
        [*run, *where, *train], env=bed.environment, cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "training on 2 slots" in done.stdout


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    with VirtualCluster.up(3, 1, rate="200mbit", loopback=False) as cluster:
        yield Bed(cluster, tmp_path)


def test_an_environment_comes_whole_or_not_at_all(bed: Bed) -> None:
    prefix, new = str(bed.prefix), new_name(str(bed.prefix))
    folder = bed.prefix.parent
    # One host has no room; the leader is killed while the others copy.
    bed.on(2, f"mkdir -p '{folder}' && mount -t tmpfs -o size=4m none '{folder}'")
    # Seen from this machine, which is quick: a second later all is there.
    seen = bed.cluster.folder / "hosts" / bed.cluster.hosts[0] / new.lstrip("/")

    def arrives() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return any(path.lstat().st_size > 1_000_000 for path in seen.rglob("*"))
        return False

    there = ""
    for _ in range(10):
        process = bed.start("install")
        until(lambda: arrives() or process.poll() is not None, "the first file")  # noqa: B023
        process.kill()
        process.communicate()
        there = bed.on(0, f"ls '{folder}'")
        if process.returncode < 0 and there != bed.prefix.name:
            break
        for number in range(2):  # a busy machine was too late for it
            bed.on(number, f"rm -rf '{folder}'/*")
    assert there == f"{bed.prefix.name}.hvd_elastic-new"

    *well, full = bed("install", status=1)
    assert [found["environment"] for found in well] == ["installed", "installed"]
    assert full["error"].startswith(f"host {full['host']}: {new} needs ")
    assert bed.on(2, f"ls '{prefix}'") == ""
    site = bed.large.parent
    package = "-c 'import hvd_elastic, sys; print(sys.prefix, hvd_elastic.__file__)'"
    for number in range(2):
        there = bed.on(number, f"'{prefix}/bin/python' {package}")
        assert there == f"{prefix} {site}/hvd_elastic/__init__.py"
        assert bed.on(number, f"ls '{folder}'") == "env"

    if ALL:
        run_there(bed)

    # A run uses it on one host: nothing changes anywhere, and what has not changed is no matter.
    command = [
        "env",
        "HVD_ELASTIC_RUN_ID=digits-1",
        f"{prefix}/bin/python",
        "-c",
        "input('ready\\n')",
    ]
    running = bed.cluster.popen_on(
        bed.cluster.hosts[1], command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert running.stdout is not None
    assert running.stdout.readline().strip() == "ready"
    only = ["--hosts", ",".join(bed.cluster.hosts[:2])]
    assert [found["environment"] for found in bed("install", *only, "--dry-run")] == [
        "up to date",
        "up to date",
    ]
    (bed.large.parent / "added.py").write_text("VALUE = 1\n")
    (bed.large.parent / "checkout.pth").touch()
    idle, busy = bed("install", *only, status=1)
    assert busy["error"].startswith(
        f"host {busy['host']}: {prefix} is in use there by run digits-1"
    )
    assert f"in use on {busy['host']}" in idle["error"]
    assert [bed.on(number, f"ls '{folder}'; ls '{site}/added.py'") for number in (0, 1)] == [
        "env",
        "env",
    ]
    left = bed("uninstall", *only, "--only", "environment", "--yes", status=1)
    assert [found["found"][0]["removed"] for found in left] == [True, False]
    assert "in use there by run digits-1" in left[1]["error"]
    running.communicate("\n")

    # Only what differs is sent, to the host that has an older one.
    (again,) = bed("install", "--hosts", busy["host"])
    assert (again["files"], again["size_bytes"]) == (1, 10)
    assert bed.on(1, f"ls '{folder}'; ls '{site}/added.py'") == f"env\n{site}/added.py"


@COSTLY
@pytest.mark.timeout(5400)
def test_the_commands_of_the_readme_lead_from_a_clone_to_a_run_over_three_hosts(
    tmp_path: Path,
) -> None:
    """Literally, on hosts that have none of our files, and whose keys nobody has accepted."""
    text = (ROOT / "README.md").read_text().partition("## Install and run")[2]
    commands = re.sub(" +#.*", "", text.split("```")[1].strip())
    assert len(commands.splitlines()) == 4
    clone = tmp_path / "hvd_elastic"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    (clone / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "HVD_ELASTIC_HOME": str(tmp_path / "home")}
    environment.pop("PYTHONPATH", None)
    with VirtualCluster.up(3, 1, loopback=False) as cluster:
        shutil.copy(cluster.hostfile, clone / "hosts")
        assert cluster.run_on(cluster.hosts[0], ["test", "-e", str(clone)]).returncode == 1
        done = subprocess.run(
            # A terminal, since --bootstrap asks there.
            ["script", "-qec", commands.replace("\n", " && "), "/dev/null"],
            input="y\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=clone,
            env={**environment, "HVD_ELASTIC_SSH_CONFIG": str(cluster.ssh_config)},
        )
        assert done.returncode == 0, done.stdout[-5000:]
    assert "trained on 3 ranks" in done.stdout
    assert "run succeeded after 20 steps" in done.stdout
