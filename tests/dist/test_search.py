"""Real studies: trials are jobs that share slots, and neither is lost or run twice when killed."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import read_records
from tests.dist import jobs
from tests.dist.jobs import TINY, command, ended, environment, hostfile_of, write_script
from tests.dist.running import Stage
from tests.dist.test_jobs import Cluster, until
from tests.paths import COSTLY, LIMIT_S

pytest.importorskip("optuna")
pytestmark = pytest.mark.dist
shared = jobs.shared

# A curve that rises to a height that the rate decides; the best is at 0.01.
SCRIPT = TINY.replace("import argparse", "import argparse\nimport math").replace(
    "args = parser", 'parser.add_argument("--lr", type=float)\nargs = parser'
).replace(
    "            state.commit(loss=loss)\n",
    "            state.commit(loss=loss)\n"
    "        height = 1 - abs(math.log10(args.lr) + 2) / 4\n"
    '        hvd.report(**{"val/height": height * (1 - 0.5 ** (epoch + 1))})\n',
)  # fmt: skip
SEARCH = (
    *("search", "--param", "lr=1e-4,1e-3,1e-2,1e-1,1,10", "--sampler", "grid"),
    *("--metric", "val/height", "--goal", "max", "--name", "tiny"),
)


class Searching:
    """A process that searches; killed with the block."""

    def __init__(self, cluster: Cluster, *arguments: object) -> None:
        self.output = cluster.home / "search.out"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cluster.home,
                env=environment(cluster.home),
                start_new_session=True,
            )

    def wait(self) -> str:
        """What it has printed until its end."""
        self.process.wait(LIMIT_S)
        return self.output.read_text()


@pytest.fixture
def local(tmp_path: Path) -> Any:
    """A cluster of this machine."""
    write_script(tmp_path, SCRIPT)
    with Cluster(tmp_path, hostfile_of(tmp_path / "hosts", ["localhost"], slots=2)) as cluster:
        yield cluster


def study(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cluster.call("search", "show", "tiny", "--json").stdout)
    return found


def search_and_kill(cluster: Cluster, arguments: Sequence[object], kills: int) -> str:
    """Search, and kill search and daemon so often; return what the searches have printed."""
    search = Searching(cluster, *arguments)
    for number in range(kills):
        with ended(search.process):
            known = 1 + number
            until(lambda: len(cluster.queue()) > known, "a trial more is submitted")  # noqa: B023
            search.process.kill()
        cluster.kill_daemon()
        cluster.up()
        search = Searching(cluster, *arguments)  # what the shell's history has
    with ended(search.process):
        printed = search.wait()
    assert search.process.returncode == 0, printed
    assert "study tiny has ended" in printed, printed
    return printed


def assert_exact(cluster: Cluster, number: int, printed: str) -> list[dict[str, Any]]:
    """No trial was lost or run twice, and each has read each example once; return them."""
    names = Counter(job["name"] for job in cluster.queue())
    assert names == {f"tiny.{each}": 1 for each in range(number)}, printed
    found = study(cluster)
    assert found["state"] == "ended"
    trials: list[dict[str, Any]] = found["trials"]
    assert len(trials) == number
    assert {trial["status"] for trial in trials} <= {"done", "pruned"}, printed
    for trial in trials:
        if trial["points"]:
            audit = read_records(cluster.home / "runs" / trial["run_id"] / "audit.jsonl")
            assert check_audit(audit).ok, trial
    return trials


RUNGS = ("--rungs", "2", "--reduction", "2", "--max-examples", "600", "--audit")
TRAIN = ("--", sys.executable, "tiny.py", "--lr", "{lr}", "--epochs", "8", "--step-time", "0.01")


def test_a_search_and_a_daemon_that_are_killed_lose_no_trial_and_run_none_twice(
    local: Cluster,
) -> None:
    printed = search_and_kill(local, (*SEARCH, *RUNGS, *TRAIN), 1)
    trials = assert_exact(local, 6, printed)
    assert trials[0]["params"] == {"lr": "1e-2"}
    assert (trials[0]["status"], trials[0]["rung"]) == ("done", 2)
    assert all(trial["examples"] >= 300 for trial in trials)

    best = json.loads(local.call("search", "best", "tiny", "--json").stdout)
    assert best["trial"] == trials[0]["trial"]
    rows = [*csv.DictReader(local.call("search", "show", "tiny", "--csv").stdout.splitlines())]
    assert [row["lr"] for row in rows] == [str(trial["params"]["lr"]) for trial in trials]
    local.call("search", "show", "tiny", "--out", local.home / "tiny.html")
    page = (local.home / "tiny.html").read_text()
    assert page.count('<rect class="key-muted"') >= 6
    assert page.count("<title>trial ") == 6


@COSTLY
def test_sixteen_trials_on_four_hosts_outlive_ten_kills_and_a_lost_host(
    stage: Stage, shared: Path, tmp_path: Path
) -> None:
    stage.boot_all()
    script = write_script(shared, SCRIPT)
    hostfile = hostfile_of(tmp_path / "hosts", stage.hosts[:4], slots=2)
    cluster = Cluster(tmp_path, hostfile, "virtual", ("-F", stage.cluster.ssh_config))
    arguments = (
        *("search", "--name", "tiny", "--param", "lr=1e-4..10:log", "--trials", "16"),
        *("--metric", "val/height", "--goal", "max", "--rungs", "3", "--reduction", "2"),
        *("--max-examples", "2400", "--audit", "--checkpoint-every", "1"),
        *("--", sys.executable, script, "--lr", "{lr}", "--epochs", "30", "--step-time", "0.02"),
    )
    with cluster:
        lost = threading.Timer(20, lambda: stage.cluster.crash(stage.hosts[1]))
        back = threading.Timer(40, lambda: stage.cluster.boot(stage.hosts[1]))
        lost.start()
        back.start()
        printed = search_and_kill(cluster, arguments, 10)
        lost.join()
        back.join()
        assert_exact(cluster, 16, printed)


@COSTLY
def test_failing_trials_end_the_study_with_their_cause(local: Cluster) -> None:
    """And a metric that is never reported ends it after the first trial."""
    failing = Searching(
        local, *SEARCH, "--", sys.executable, "tiny.py", "--lr", "{lr}", "--fail-at", -1
    )
    with ended(failing.process):
        printed = failing.wait()
    assert failing.process.returncode == 1
    assert "trials that have ended have failed: " in printed
    assert "broken at import" in printed.splitlines()[-1]
    failing.output.unlink()
    # No trial of it has trained, so another study may have its name.
    arguments = [word if word != "val/height" else "accuracy" for word in SEARCH]
    mute = Searching(
        local, *arguments, *("--", sys.executable, "tiny.py", "--lr", "{lr}", "--epochs", "1")
    )
    with ended(mute.process):
        printed = mute.wait()
    assert mute.process.returncode == 1
    last = printed.splitlines()[-1]
    assert "never reported 'accuracy'; it reported loss, val/height" in last, printed
    assert len(local.queue()) < 3 + 6


def test_ctrl_c_leaves_the_trials_and_stop_ends_them(local: Cluster) -> None:
    train = ("--", sys.executable, "tiny.py", "--lr", "{lr}", "--until", "never")
    search = Searching(local, *SEARCH, *train, "--step-time", "0.05")
    with ended(search.process):
        until(lambda: any(job["status"] == "running" for job in local.queue()), "one runs")
        search.process.send_signal(signal.SIGINT)
        printed = search.wait()
    assert search.process.returncode == 130
    assert "hvd-elastic search resume tiny" in printed
    assert "Traceback" not in printed
    assert study(local)["state"] == "detached"
    done = local.call("search", "stop", "tiny")
    assert "study tiny has ended" in done.stdout
    assert {job["status"] for job in local.queue()} == {"cancelled"}
    assert study(local)["state"] == "stopped"
