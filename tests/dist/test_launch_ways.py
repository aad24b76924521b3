"""One training script, launched in every way we promise; each reads every example exactly once."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_elastic.records.json_lines import read_records
from hvd_elastic.virtual import VirtualCluster
from tests.command_lines import CommandLines
from tests.dist import jobs
from tests.dist.jobs import (
    START_S,
    Job,
    assert_nothing_left,
    audit_of,
    command,
    ended,
    environment,
    hostfile_of,
    write_script,
)
from tests.paths import COSTLY, LIMIT_S, ROOT
from tests.waiting import until

pytestmark = pytest.mark.dist
hosts, shared = jobs.hosts, jobs.shared

DIGITS = ROOT / "scripts" / "examples" / "digits.py"
EPOCHS = 2
DEADLINE_S = LIMIT_S
HOROVODRUN = shutil.which(
    "horovodrun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)
needs_horovodrun = pytest.mark.skipif(HOROVODRUN is None, reason="Horovod is not built")


def why_no_mpi() -> str:
    """Why a job under Open MPI cannot be tried here; empty when it can."""
    if shutil.which("mpirun") is None:
        return "Open MPI's mpirun is not installed"
    program = "import mpi4py.MPI, horovod.torch as h; raise SystemExit(0 if h.mpi_built() else 9)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode == 9:
        return "Horovod was built without MPI"
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


@pytest.fixture(scope="module")
def mpi() -> None:
    if reason := why_no_mpi():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn", reason="the digits come from scikit-learn")
    folder = tmp_path_factory.mktemp("data") / "digits"
    prepare = [sys.executable, str(ROOT / "datasets_prep" / "digits.py"), "--out", str(folder)]
    subprocess.run(prepare, check=True, capture_output=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a run without a leader keeps its records."""
    yield tmp_path / "run"
    # horovodrun is not asked to tidy up, so what it left is ended by its environment.
    for process in jobs.marked(str(tmp_path / "run"), "HVD_ELASTIC_RUN_FOLDER"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def start(words: list[Any], folder: Path, output: Path) -> subprocess.Popen[bytes]:
    """A launcher that is not ours, in a session of its own."""
    own = {"HVD_ELASTIC_RUN_FOLDER": str(folder), "HVD_ELASTIC_AUDIT": "1"}
    env = environment(folder.parent, **own)
    # horovodrun calls the first python on PATH.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    with output.open("wb") as file:
        return subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder.parent,
            env=env,
            start_new_session=True,
        )


def finish(words: list[Any], folder: Path) -> str:
    output = folder.parent / "output"
    with ended(start(words, folder, output)) as process:
        status = process.wait(DEADLINE_S)
        assert status == 0, output.read_text(errors="replace")
    return output.read_text(errors="replace")


def digits(data: Path, *more: object) -> list[Any]:
    options = ["--data", data, "--epochs", EPOCHS, *more]
    return [sys.executable, DIGITS, *options]


def check(folder: Path, sizes: set[int], epochs: int = EPOCHS) -> None:
    """Exactly once, by as many processes as there should be, and something was learned."""
    result = audit_of(folder)
    assert result.ok, result.problems()
    assert result.complete_epochs == epochs
    made = [event for event in read_records(folder / "events.jsonl") if event["kind"] == "metrics"]
    assert {event["size"] for event in made} == sizes
    assert made[-1]["test_accuracy"] > 0.85


def test_plain_python(data: Path, folder: Path) -> None:
    finish(digits(data), folder)
    check(folder, {1})


@needs_horovodrun
def test_horovodrun(data: Path, folder: Path) -> None:
    finish([HOROVODRUN, "-np", 2, "--network-interfaces", "lo", *digits(data)], folder)
    check(folder, {2})


@needs_horovodrun
def test_horovodrun_elastic_with_a_slot_that_is_added_and_taken_away(
    data: Path, folder: Path, tmp_path: Path
) -> None:
    """Horovod's own driver changes the ranks; state, data and sums follow."""
    slots, discovery = tmp_path / "slots", tmp_path / "discover.sh"
    slots.write_text("localhost:1\n")
    discovery.write_text(f"#!/bin/sh\ncat {slots}\n")
    discovery.chmod(0o755)
    output = tmp_path / "output"
    options = ["-np", 1, "--min-np", 1, "--max-np", 2, "--network-interfaces", "lo"]
    script = tmp_path / "counting.py"
    joined = tmp_path / "joined"
    script.write_text(_counting(DIGITS.read_text(), joined))
    train = [sys.executable, script, "--data", data, "--step-time", 0.03, "--epochs", 8]
    words = [HOROVODRUN, *options, "--host-discovery-script", discovery, *train]
    with ended(start(words, folder, output)) as process:
        wait = partial(until, limit_s=START_S, process=process, said=output.read_text)

        def offer(number: int) -> None:
            new = tmp_path / "slots.new"
            new.write_text(f"localhost:{number}\n")
            new.replace(slots)

        events = folder / "events.jsonl"
        began = time.monotonic()

        def is_two() -> bool:
            # Horovod's driver tells rank 0 of a change once, whether or not a busy one hears it.
            offer(1 if (time.monotonic() - began) % 43 > 40 else 2)
            return events.exists() and '"size":2' in events.read_text()

        wait((folder / "audit.jsonl").exists)
        wait(is_two)
        joined.touch()
        offer(1)
        assert process.wait(DEADLINE_S) == 0, output.read_text(errors="replace")
    check(folder, {1, 2}, epochs=8)
    last = read_records(folder / "events.jsonl")[-1]
    assert last["counted"] == 8 * audit_of(folder).examples


def _counting(script: str, joined: Path) -> str:
    """The script, with an Accumulator that is synchronised at the end alone.

    It takes its time until the file ``joined`` is there.
    """
    for before, after in {
        "time.sleep(args.step_time)": f"time.sleep(args.step_time if Path({str(joined)!r}).exists()"
        " else 0.5)",
        "\n\n@hvd.run\n": "\ntotals = hvd.Accumulator()\n\n\n@hvd.run\n",
        "state.commit(loss=loss)": "state.commit(loss=loss)\n            "
        "totals.add(examples=len(images))",
        "\nmodel.eval()": "\ntotals.synchronize()\nhvd.report(counted=totals['examples'])\n"
        "model.eval()",
    }.items():
        assert script.count(before) == 1
        script = script.replace(before, after)
    return script


def test_hvd_elastic_run(data: Path, tmp_path: Path) -> None:
    options = ("--np", 2, "--min-np", 2, "--audit")
    with Job(*options, "--", *digits(data), home=tmp_path) as job:
        assert job.wait(DEADLINE_S) == 0, job.text
    check(job.folder, {2})
    assert_nothing_left(mark=job.mark, run_id=job.run_id)


@COSTLY
def test_pictures_that_are_decoded_beside_two_ranks(tmp_path: Path) -> None:
    """ResNet on JPEG files, with a batch that adapts."""
    pytest.importorskip("PIL", reason="Pillow draws the pictures")
    pictures = tmp_path / "pictures"
    options = ["--out", pictures, "--classes", 2, "--per-class", 40, "--size", 32]
    words = [sys.executable, ROOT / "datasets_prep" / "imagenet_layout.py", *options]
    subprocess.run([str(word) for word in words], check=True, capture_output=True)
    script = ROOT / "scripts" / "examples" / "imagenet.py"
    small = ("--depth", 18, "--width", 8, "--image-size", 32, "--workers", 1)
    quick = ("--batch-size", 16, "--max-batch-size", 32, "--epochs", 2)
    train = [sys.executable, script, "--data", pictures, *small, *quick]
    with Job("--np", 2, "--audit", "--", *train, home=tmp_path) as job:
        assert job.wait(DEADLINE_S) == 0, job.text
    result = audit_of(job.folder)
    assert result.ok, result.problems()
    assert result.complete_epochs >= 2
    events = read_records(job.folder / "events.jsonl")
    made = [event for event in events if event["kind"] == "metrics"]
    assert {event["size"] for event in made} == {2}
    # Of all 16 pictures, whichever rank looked at them.
    assert made[-1]["test_accuracy"] * 16 == pytest.approx(round(made[-1]["test_accuracy"] * 16))
    assert "on 16 pictures" in job.text
    assert any(event["kind"] == "checkpoint" for event in events)
    assert_nothing_left(mark=job.mark, run_id=job.run_id)


# ---- Open MPI

MPI_SCRIPT = '''\
"""mpi4py beside Horovod: both count the same ranks, in one MPI world."""
import os
from pathlib import Path

from mpi4py import MPI
import horovod.torch as hvd
import torch

hvd.init()
world = MPI.COMM_WORLD
assert (world.Get_rank(), world.Get_size()) == (hvd.rank(), hvd.size())
total = world.allreduce(hvd.rank() + 1)
mine = torch.tensor([float(hvd.rank() + 1)])
summed = hvd.allreduce(mine, name="ranks", op=hvd.Sum).item()
said = f"rank {hvd.rank()} of {hvd.size()}: {total} {summed} {os.environ['SECRET_TOKEN']}"
# mpirun mixes what ranks print without regard to lines
Path(f"said-{hvd.rank()}").write_text(said)
'''


def run_mpi(
    home: Path, *arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("run", "--mpi", *arguments),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=cwd or home,
        # Ranks that wait leave the cores to the others.
        env=environment(home, OMPI_MCA_mpi_yield_when_idle="1", **(env or {})),
        timeout=DEADLINE_S,
    )


@pytest.mark.usefixtures("mpi")
def test_mpi_trains_the_same_script(data: Path, folder: Path) -> None:
    own = {"HVD_ELASTIC_RUN_FOLDER": str(folder), "HVD_ELASTIC_AUDIT": "1"}
    done = run_mpi(folder.parent, "--np", 2, "--", *digits(data), env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    check(folder, {2})


@pytest.mark.usefixtures("mpi")
@pytest.mark.parametrize("where", [pytest.param("here", marks=COSTLY), "on two hosts"])
def test_mpi4py_beside_horovod_and_no_value_in_a_command_line(
    tmp_path: Path, shared: Path, hosts: VirtualCluster, where: str
) -> None:
    canary = f"canary-{secrets.token_hex(12)}"
    script = write_script(shared, MPI_SCRIPT, "with_mpi4py.py")
    options: list[Any] = ["--np", 2]
    if where != "here":
        if hosts.loopback:
            pytest.skip("Open MPI takes hosts on the loopback network for one")
        hostfile = hostfile_of(tmp_path / "hosts", hosts.hosts[:2])
        options = ["-H", hostfile, "-F", hosts.ssh_config]
    for rank in (0, 1):
        (shared / f"said-{rank}").unlink(missing_ok=True)
    with CommandLines(canary) as watcher:
        words = [*options, "--", sys.executable, script]
        done = run_mpi(tmp_path, *words, cwd=shared, env={"SECRET_TOKEN": canary})
    assert done.returncode == 0, done.stdout + done.stderr
    said = [(shared / f"said-{rank}").read_text() for rank in (0, 1)]
    assert said == [f"rank {rank} of 2: 3 3.0 {canary}" for rank in (0, 1)]
    assert watcher.rounds > 20
    assert not watcher.found
    assert_nothing_left(cluster=hosts)


@pytest.mark.usefixtures("mpi")
def test_mpi_ends_with_its_ranks_on_ctrl_c(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    # One write for the whole line: mpirun passes on what each rank writes as it comes.
    script = write_script(tmp_path, "import os, signal\nos.write(1, b'up\\n')\nsignal.pause()\n")
    process = subprocess.Popen(
        command("run", "--mpi", "--np", 2, "--", sys.executable, script),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(tmp_path, **{jobs.MARK: mark}),
        start_new_session=True,
    )
    with ended(process):
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=START_S)
        assert process.returncode != 0
        assert "Traceback" not in said
        assert_nothing_left(mark=mark)


@pytest.mark.usefixtures("mpi")
def test_a_script_that_fails_under_mpi_fails_the_job(tmp_path: Path) -> None:
    script = write_script(tmp_path, "raise SystemExit(3)\n")
    done = run_mpi(tmp_path, "--np", 2, "--", sys.executable, script)
    assert done.returncode == 3
    assert "Traceback" not in done.stdout + done.stderr


def test_mpi_takes_no_elastic_bounds(tmp_path: Path) -> None:
    script = write_script(tmp_path, "")
    done = run_mpi(tmp_path, "--max-np", 2, "--", sys.executable, script)
    assert done.returncode == 2
    assert "--min-np and --max-np" in done.stderr


def test_mpi_that_is_not_installed_is_named_with_its_packages(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.symlink_to(sys.executable)
    script = write_script(tmp_path, "")
    done = run_mpi(tmp_path, "--", str(python), script, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "apt-get install openmpi-bin libopenmpi-dev" in done.stderr
    assert "hvd-elastic build-horovod" in done.stderr
