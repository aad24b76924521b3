"""What a user can get wrong: a clear message, the right exit status, nothing left behind."""

from __future__ import annotations

import contextlib
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvd_elastic.virtual import VirtualCluster
from tests.dist import jobs
from tests.dist.jobs import (
    TINY,
    Job,
    assert_nothing_left,
    call,
    hostfile_of,
    marked,
    write_script,
)
from tests.paths import ALL, COSTLY
from tests.small_disk import mounted

pytestmark = pytest.mark.dist

hosts, shared = jobs.hosts, jobs.shared
ONE_PROCESS = ["--np", 1, "--checkpoint-every", 0]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def script(shared: Path) -> Path:
    return write_script(shared)


def refused(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """A message that says what, where, and what to do."""
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr + done.stdout
    for word in words:
        assert word in done.stderr


# ---- hosts


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("missing", ["has no Python at", "--python"]),
        ("other processor", ["is there and does not run", "hvd-elastic install", "--python"]),
        ("without package", ["has no package hvd_elastic", "Install it there", "--python"]),
        ("other minor", ["has Python 3.8.1", "the leader has 3.", "--python"]),
        ("other version", ["has hvd_elastic 0.0.0", "Install the same version on every host"]),
    ],
)
def test_host_with_a_python_that_is_of_no_use(
    home: Path, script: Path, shared: Path, hosts: VirtualCluster, python: str, words: list[str]
) -> None:
    path = interpreter(shared, python)
    hostfile = hostfile_of(home / "hosts", hosts.hosts[:2])
    options = ["-H", hostfile, "-F", hosts.ssh_config, "--python", path, "--run-id", "job"]
    done = call("run", *options, "--", sys.executable, script, home=home)
    assert done.returncode == 1, done.stderr
    for word in [*words, *hosts.hosts[:2], str(path) if "version" not in python else ""]:
        assert word in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "trying again" not in done.stdout, "another try cannot help"
    assert_nothing_left(run_id="job", cluster=hosts)


def interpreter(folder: Path, kind: str) -> Path:
    """A Python with a fault, as a host may have it."""
    path = folder / f"python-{kind.replace(' ', '-')}"
    if kind == "missing":
        return path
    if kind == "other processor":
        program = bytearray(Path(shutil.which("true") or "").read_bytes())
        program[18:20] = (183 if platform.machine() == "x86_64" else 62).to_bytes(2, sys.byteorder)
        path.write_bytes(program)  # ELF of aarch64, or of x86-64
        path.chmod(0o755)
        return path
    python = shlex.quote(sys.executable)
    if kind == "without package":
        # Isolated: neither PYTHONPATH nor what is installed for it.
        path.write_text(f'#!/bin/sh\nexec {python} -I -S "$@"\n')
    else:
        fault = {
            "other minor": "import platform; platform.python_version = lambda: '3.8.1'",
            "other version": "import hvd_elastic; hvd_elastic.__version__ = '0.0.0'",
        }[kind]
        root = Path(__file__).resolve().parents[2]
        sent = f"import sys; sys.path.insert(0, {str(root)!r}); {fault}; import runpy; "
        sent += "runpy.run_module('hvd_elastic.agent.agent', run_name='__main__')"
        path.write_text(f"#!/bin/sh\nexec {python} -c {shlex.quote(sent)}\n")
    path.chmod(0o755)
    return path


def test_host_that_cannot_be_reached_is_named_and_tried_again(home: Path, script: Path) -> None:
    """It may come up later, so the run waits for it, says so, and ends when it is told to."""
    with socket.socket() as sock:  # bound and not listening: connections are refused
        sock.bind(("127.0.0.99", 0))
        port = sock.getsockname()[1]
        hostfile = home / "hosts"
        hostfile.write_text(f"127.0.0.99 port={port} slots=1\n")
        with Job("-H", hostfile, "--", sys.executable, script, home=home) as job:
            job.until(lambda: "trying again" in job.text, "the host is named")
            job.until(lambda: job.events("waiting"), "it waits")
            job.process.send_signal(signal.SIGINT)
            assert job.wait() == 130
        assert job.text.count("no ssh server listens there") == 1, "the cause is said once"
        assert "waiting for 1 worker: host 127.0.0.99 cannot be reached (trying" in job.text
        assert "port= in the hostfile" in job.text
        assert "Traceback" not in job.text
        assert_nothing_left(mark=job.mark)


def test_hostfile_without_a_name_that_is_known_ends_the_run(home: Path, script: Path) -> None:
    """A typing error is not waited out."""
    hostfile = hostfile_of(home / "hosts", ["no-such-host.invalid", "nor-this.invalid"])
    with Job("-H", hostfile, "--min-np", 2, "--", sys.executable, script, home=home) as job:
        assert job.wait() == 1
    assert "waiting for 2 workers: hosts no-such-host.invalid, nor-this.invalid" in job.text
    (finished,) = job.events("run_finished")
    assert finished["message"].startswith(
        "the names of hosts no-such-host.invalid, nor-this.invalid cannot be looked up (4 tries)"
    )
    assert "Fix the hostfile" in job.text
    assert "Traceback" not in job.text
    assert_nothing_left(mark=job.mark)


def test_one_host_that_cannot_be_reached_does_not_stop_the_others(
    home: Path, script: Path, hosts: VirtualCluster
) -> None:
    hostfile = hostfile_of(home / "hosts", ["no-such-host.invalid", hosts.hosts[0]])
    options = ["-H", hostfile, "-F", hosts.ssh_config, "--checkpoint-every", 0]
    with Job(*options, "--", sys.executable, script, home=home) as job:
        assert job.wait() == 0, job.text
    assert "host no-such-host.invalid" in job.text
    assert [event["host"] for event in job.events("worker_joined")] == [hosts.hosts[0]]
    assert_nothing_left(mark=job.mark, cluster=hosts)


# ---- scripts


@pytest.mark.parametrize("step", [-1, pytest.param(0, marks=COSTLY), 100])
def test_script_that_raises_ends_the_run_with_its_traceback_once(
    home: Path, script: Path, hosts: VirtualCluster, step: int
) -> None:
    """All ranks raise alike; that is no failure of hosts, so nothing is tried again."""
    hostfile = hostfile_of(home / "hosts", hosts.hosts[:2])
    options = ["-H", hostfile, "-F", hosts.ssh_config, "--checkpoint-every", 0, "--min-np", 2]
    arguments = ["--epochs", 20, "--fail-at", step]
    with Job(*options, "--", sys.executable, script, *arguments, home=home) as job:
        assert job.wait() == 1, job.text
    error = "ValueError: broken " + ("at import" if step < 0 else f"in step {step}")
    assert job.text.count("Traceback (most recent call last)") == 1, job.text
    assert job.text.count(f"\n{error}\n") == 1, job.text
    assert len(job.events("script_failed")) == 1
    assert job.events("script_failed")[0]["traceback"].rstrip().endswith(error)
    (finished,) = job.events("run_finished")
    assert finished["status"] == "failed"
    assert finished["steps"] == max(0, step)
    # No storm: each slot was started once, in the first generation.
    assert len(job.events("rescale_started")) <= 1
    assert len(job.events("worker_standby")) <= 2
    logs = [path.read_text() for path in (job.folder / "logs").iterdir()]
    assert any(error in text for text in logs), "it is in the worker's log too"
    assert_nothing_left(mark=job.mark, cluster=hosts)


def test_script_that_is_edited_while_it_trains_is_told(home: Path, tmp_path: Path) -> None:
    """A worker that takes a lost one's place would run other code than those that train."""
    script, over = write_script(tmp_path), tmp_path / "over"
    options = ["--np", 2, "--checkpoint-every", 0, "--", sys.executable, script]
    with Job(*options, "--step-time", 0.02, "--until", over, home=home) as job:
        job.until_trains(2)
        script.write_text(script.read_text() + "# for the next run\n")
        mine = {process.pid for process in marked(job.mark)}
        (worker,) = [p for p in marked("1", "HVD_ELASTIC_LOCAL_RANK") if p.pid in mine]
        worker.kill()
        job.until(lambda: len(job.events("worker_joined")) == 3, "a worker in its place")
        over.touch()
        assert job.wait() == 0, job.text
    (told,) = [event for event in job.events("warning") if "runs another" in event["message"]]
    assert told["message"].startswith("worker localhost:1 runs another tiny.py than the workers")
    assert_nothing_left(mark=job.mark)


def failed_run(home: Path, text: str, *arguments: object) -> Job:
    """Run a script on two ranks until it has failed."""
    script = write_script(home, text)
    options = ["--np", 2, "--min-np", 2, "--checkpoint-every", 0]
    with Job(*options, "--", sys.executable, script, *arguments, home=home) as job:
        assert job.wait() == 1, job.text
    return job


def test_data_sets_that_differ_between_ranks_end_the_run(home: Path) -> None:
    """As where a host has an incomplete copy: each rank would read an order of its own."""
    text = TINY.replace("hvd.init()\n", "hvd.init()\nargs.examples -= 10 * hvd.local_rank()\n", 1)
    job = failed_run(home, text)
    assert "rank 1 reads another data set than the rank whose state it has received" in job.text
    assert "they differ in 'len()'" in job.text
    assert "bring the same files to all hosts" in job.text
    assert "Traceback" not in job.text
    (finished,) = job.events("run_finished")
    assert finished["steps"] < 5, "found in one of the first steps"


def test_step_that_one_rank_leaves_out_alone_ends_the_run(home: Path) -> None:
    """All ranks leave out every third step, which is their right, and one the tenth."""
    text = TINY.replace(
        "            optimizer.zero_grad()\n",
        "            skipped = (state.steps + left_out) % 3 == 2\n"
        "            if skipped or (state.steps + left_out == 9 and hvd.rank() == 1):\n"
        "                left_out += 1\n"
        "                continue\n"
        "            optimizer.zero_grad()\n",
    ).replace("def train(state):\n", "def train(state):\n    left_out = 0\n")
    job = failed_run(home, text)
    assert ": step 10 was left out on rank 1 alone, of 2:" in job.text
    assert "have all decide alike, by hvd.allreduce" in job.text
    assert "Traceback" not in job.text
    (finished,) = job.events("run_finished")
    assert finished["steps"] == 9


def test_stream_that_ends_early_on_one_rank_ends_the_run(home: Path) -> None:
    """Each rank reads its own share, and that of rank 1 is too short."""
    text = TINY.replace(
        "loader = hvd.DataLoader(data, args.batch_size, shuffle=True)",
        "examples = list(data)\n\n\n"
        "def share(epoch, number, start):\n"
        "    return iter(examples[50 * number + start : 50 * number + (50, 23)[number]])\n\n\n"
        "stream = Stream(share, length=100, shares=2, chunk=5)\n"
        "loader = hvd.DataLoader(stream, args.batch_size)",
    ).replace("import torch\nfrom", "import torch\nfrom hvd_elastic.data import Stream\nfrom", 1)
    job = failed_run(home, text)
    assert "share 1 of 2 of the stream ended after 23 examples in epoch 0" in job.text
    assert "give Stream a length of at most 46" in job.text
    (finished,) = job.events("run_finished")
    assert (finished["status"], finished["steps"]) == ("failed", 4)


def test_parameters_that_a_script_changes_by_itself_end_the_run_by_name(home: Path) -> None:
    """No optimizer takes these steps, so nobody knows of them; the parameters tell."""
    text = TINY.replace(
        "loader = hvd.DataLoader(",
        "head = torch.nn.Linear(2, 2)\n\n\n"
        "def descend(head):\n"
        "    with torch.no_grad():\n"
        "        for parameter in head.parameters():\n"
        "            parameter -= 0.1 * parameter.grad\n\n\n"
        "loader = hvd.DataLoader(",
    )
    text = text.replace("cross_entropy(model(inputs)", "cross_entropy(head(model(inputs))")
    text = text.replace("optimizer.step()\n", "optimizer.step()\n            descend(head)\n")
    text = text.replace("State(model=model,", "State(model=model, head=head,")
    job = failed_run(home, text, "--epochs", 9)
    assert "hold different parameters: rank 1 differs from rank 0 in head." in job.text
    assert "Traceback" not in job.text
    (finished,) = job.events("run_finished")
    assert finished["steps"] <= 8


@pytest.mark.parametrize("audit", [False, True])
def test_loader_of_pytorch_left_in_is_told_in_the_first_step(home: Path, audit: bool) -> None:
    """Without --audit training goes on, and its steps are counted."""
    text = TINY.replace("hvd.DataLoader(data,", "torch.utils.data.DataLoader(data,")
    text = text.replace("            state.commit(loss=loss)\n", "")
    script = write_script(home, text)
    options = ["--np", 2, "--min-np", 2, "--checkpoint-every", 0, *(["--audit"] if audit else [])]
    with Job(*options, "--", sys.executable, script, "--epochs", 2, home=home) as job:
        assert job.wait() == (1 if audit else 0), job.text
    assert "for a batch that does not come from hvd_elastic.torch.DataLoader" in job.text
    assert "without a DistributedSampler" in job.text
    assert "Traceback" not in job.text
    (finished,) = job.events("run_finished")
    assert finished["steps"] == (0 if audit else 20)
    assert len(job.events("warning")) == (0 if audit else 1)


def test_script_that_one_host_does_not_have(
    home: Path, tmp_path: Path, hosts: VirtualCluster
) -> None:
    if hosts.loopback:
        pytest.skip("hosts on the loopback network share all files")
    script = write_script(tmp_path)  # /tmp is each virtual host's own
    hostfile = hostfile_of(home / "hosts", hosts.hosts[:1])
    options = ["-H", hostfile, "-F", hosts.ssh_config]
    with Job(*options, "--", sys.executable, script, home=home, cwd=Path("/var")) as job:
        assert job.wait() == 1
    assert str(script) in job.text
    assert f"Copy it: copyclust HOSTFILE {script} {script}" in job.text
    assert "Traceback" not in job.text
    assert_nothing_left(mark=job.mark, cluster=hosts)


def test_script_that_trains_with_nothing_of_ours(home: Path) -> None:
    script = write_script(home, "print('no training here')\n")
    with Job(*ONE_PROCESS, "--", sys.executable, script, home=home) as job:
        assert job.wait() == 1
    assert "without ever calling the run function of hvd_elastic" in job.text
    assert "Traceback" not in job.text
    assert_nothing_left(mark=job.mark)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(
            "import torch.distributed as dist\ndist.init_process_group('gloo')\n",
            "line 2: this expects the process group of torchrun; remove init_process_group, ",
            id="before-init",
        ),
        pytest.param(
            "import torch\nimport hvd_elastic.torch as hvd\nhvd.init()\n"
            "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n",
            "line 4: this expects the process group of torchrun; remove init_process_group, ",
            marks=COSTLY,
            id="after-init",
        ),
    ],
)
def test_script_that_expects_torchrun_is_told_what_to_use(
    home: Path, text: str, words: str
) -> None:
    script = write_script(home, text)
    with Job(*ONE_PROCESS, "--", sys.executable, script, home=home) as job:
        assert job.wait() == 1
    assert f"in worker localhost:0:\n{script}, {words}" in job.text
    assert "hvd.DistributedOptimizer(optimizer, model)" in job.text
    assert "Traceback" not in job.text
    (failed,) = job.events("script_failed")
    assert failed["traceback"].startswith(str(script))
    assert_nothing_left(mark=job.mark)


def test_network_interface_that_no_host_has(home: Path, script: Path) -> None:
    options = [*ONE_PROCESS, "--network-interface", "nope0"]
    with Job(*options, "--", sys.executable, script, home=home) as job:
        assert job.wait() == 1
    said = "host localhost has no network interface nope0 with an address; it has "
    assert said in job.text
    assert "lo (127.0.0.1)" in job.text
    assert "Traceback" not in job.text
    assert not job.events("worker_standby"), "before any worker was started"
    assert_nothing_left(mark=job.mark)


# ---- disks and checkpoints


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    with mounted(tmp_path / "small", "64k", lazy=True) as disk:
        yield disk


@pytest.mark.root
def test_disk_that_is_full_before_the_run(small_disk: Path, script: Path) -> None:
    """However little is left, and so whatever file it is that cannot be written."""
    arguments = ["--np", 1, "--run-id", "job", "--", sys.executable, "-c", "pass"]
    for free_pages in range(5) if ALL else (0, 3):
        filler = small_disk / "filler"
        filler.write_bytes(b"x" * (16 - free_pages) * 4096)
        done = call("run", *arguments, home=small_disk)
        said = done.stdout + done.stderr
        assert done.returncode == 1
        assert "Traceback" not in said
        if not (small_disk / "runs" / "job").exists():
            refused(done, 1, str(small_disk), "No space left on device", "HVD_ELASTIC_HOME")
        elif free_pages < 3:
            assert "No space left on device" in said
        assert_nothing_left(run_id="job")
        shutil.rmtree(small_disk / "runs")
        filler.unlink()


@pytest.mark.root
def test_disk_that_fills_up_during_the_run(small_disk: Path, script: Path, tmp_path: Path) -> None:
    """Training is worth more than its records: it goes on, and says what is lost.

    Since that is the checkpoint of its end too, the run can be completed once there is room.
    """
    write_script(script.parent, name="chatty.py", text=script.read_text() + "print('y' * 90000)\n")
    options = ["--np", 1, "--audit", "--checkpoint-every", 0.1, "--run-id", "job"]
    arguments = [script.parent / "chatty.py", "--epochs", 40]
    done = call("run", *options, "--", sys.executable, *arguments, home=small_disk)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert f"cannot write to {small_disk}" in done.stdout
    assert "No space left on device" in done.stdout
    assert "run failed after 400 steps, " in done.stdout
    assert "checkpoint" in done.stdout.partition("training has ended, and ")[2]
    assert_nothing_left(run_id="job")
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    again = call("run", "--resume", "job", home=small_disk)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "run succeeded after 400 steps, " in again.stdout
    assert_nothing_left(run_id="job")


@pytest.mark.root
def test_disk_that_is_full_when_a_lost_run_is_resumed(
    small_disk: Path, script: Path, tmp_path: Path
) -> None:
    """What trains is taken over; where nothing does, nothing begins that could not be kept."""
    options = ["--np", 1, "--checkpoint-every", 600, "--leader-grace", 600]
    arguments = [script, "--until", tmp_path / "enough", "--step-time", 0.02]
    with Job(*options, "--", sys.executable, *arguments, home=small_disk) as job:
        job.until_trains()
        job.process.kill()
        job.process.wait()
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:  # noqa: PT012
            while True:
                file.write(b"x")
        output = tmp_path / "resumed"
        with output.open("wb") as out:
            job.process = subprocess.Popen(
                jobs.command("run", "--resume", job.run_id, "--json"),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=jobs.environment(small_disk),
            )
        job.until(lambda: '"taken_over"' in output.read_text(), "the run is taken over")
        lines = output.read_text().splitlines()
        (warning,) = [line for line in lines if "continues without" in line]
        assert f"checkpoints cannot be written: {job.folder / 'checkpoints'} is full" in warning
        job.process.kill()
        job.process.wait()
        for process in jobs.marked(job.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        refused(
            call("run", "--resume", job.run_id, home=small_disk),
            *(1, f"checkpoints cannot be written: {job.folder / 'checkpoints'} is full"),
        )
    assert_nothing_left(run_id=job.run_id)


def test_truncated_checkpoint_is_skipped_for_an_older_one(home: Path, script: Path) -> None:
    options = ["--np", 1, "--audit", "--checkpoint-every", 0.1]
    enough = home / "enough"
    arguments = [script, "--step-time", 0.05, "--until", enough]
    with Job(*options, "--", sys.executable, *arguments, home=home) as job:
        job.until(lambda: len(job.events("checkpoint")) >= 2, "two checkpoints are there")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.text
    newest, older = sorted(job.folder.glob("checkpoints/step-*.shard"), reverse=True)[:2]
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    shutil.rmtree(job.folder / "logs")
    (job.folder / "logs").mkdir()
    enough.touch()
    done = call("run", "--resume", job.run_id, home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{newest} was skipped: it is truncated" in done.stdout
    (restored,) = job.events("restored")
    assert f"{restored['step']:012d}" in older.name
    assert job.audit().ok, job.audit().problems()
    steps = job.events("run_finished")[-1]["steps"]
    assert steps > restored["step"]
    assert steps % 10 == 0, "its last epoch is complete"
    assert_nothing_left(run_id=job.run_id)
