"""When a run asks for further nodes and gives them back, with a queue of the test's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.engines.slurm.allocation import Allocation
from hvd_elastic.engines.slurm.engine import SlurmEngine
from hvd_elastic.engines.slurm.growth import give_back, growth_of
from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host, parse_hostfile
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.records.run_folder import RunFolder
from tests.unit.engines.slurm.test_batch import SUBMISSION
from tests.unit.records.made_events import made

SPEC = RunSpec(command=("python", "train.py"), cwd="/")
SCRIPT = str(SUBMISSION.further_script)
OURS = replace(SUBMISSION, least=1, most=4, slots_per_node=2, give_back_after_s=100.0)


class Queue:
    """Slurm as far as Growth sees it: jobs by number, each a line of squeue."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}
        self.asked: list[list[str]] = []
        self._numbers = iter(range(1, 100))

    def __call__(self, command: str, *options: str) -> str:
        if command == "squeue":
            return "".join(f"{number}|{rest}\n" for number, rest in self.jobs.items())
        if command == "sbatch":
            self.asked.append(list(options[:-1]))
            number = str(next(self._numbers))
            asked = [each.partition("=")[2] for each in options if each.startswith("--nodelist")]
            self.wait(number, "".join(asked), script=options[-1])
            return f"{number}\n"
        if command == "scontrol":
            return "     Nodes=node7 CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1)\n"
        assert command == "scancel"
        for number in options:
            del self.jobs[number]
        return ""

    def wait(self, number: str, node: str = "", script: str = SCRIPT) -> None:
        self.jobs[number] = f"PENDING||1:00:00|{node}|{script}"

    def start(self, number: str, node: str, left: str = "1:00:00", script: str = SCRIPT) -> None:
        self.jobs[number] = f"RUNNING|{node}|{left}||{script}"

    @property
    def pending(self) -> list[str]:
        return [number for number, rest in self.jobs.items() if rest.startswith("PENDING")]


class Setting:
    def __init__(self, folder: Path, spec: RunSpec, *sbatch: str) -> None:
        self.queue = Queue()
        self.said: list[str] = []
        self.folder = RunFolder.create("resnet", {}, root=folder)
        first = Allocation("0", (Host("node0", slots=2),))
        self.engine = SlurmEngine(self.folder, first)
        ours = replace(OURS, sbatch=sbatch)
        self.growth = growth_of(self.engine, ours, spec, self.said.append, self.queue)

    def hosts(self) -> tuple[str, ...]:
        return parse_hostfile(self.folder.hosts).names

    def event(self, kind: str, now: float = 0.0, **fields: Any) -> None:
        self.growth.read_event(made({"kind": kind, "t": now, "mono": now, **fields}), now)

    def trains_on(self, *hosts: str, now: float = 0.0) -> None:
        size = 2 * len(hosts)
        self.event(
            "rescale_started",
            now,
            generation=1,
            from_size=0,
            to_size=size,
            hosts=list(hosts),
            slots=[2] * len(hosts),
            reason="",
        )
        self.event("rescale_finished", now, generation=1, size=size, pause_s=None)


@pytest.fixture
def fixed(tmp_path: Path) -> Setting:
    return Setting(tmp_path, SPEC)


@pytest.fixture
def goodput(tmp_path: Path) -> Setting:
    return Setting(tmp_path, replace(SPEC, policy="goodput"))


def test_without_a_policy_it_asks_for_all_nodes_at_once(fixed: Setting) -> None:
    fixed.growth.look_at_grants(0.0)
    assert len(fixed.queue.pending) == 3
    fixed.growth.look_at_grants(5.0)
    assert len(fixed.queue.jobs) == 3


def test_what_slurm_grants_joins_and_what_ends_leaves(fixed: Setting) -> None:
    fixed.growth.look_at_grants(0.0)
    fixed.queue.start("1", "node7")
    fixed.growth.look_at_grants(5.0)
    assert fixed.hosts() == ("node0", "node7")
    assert "node7 joins: job 1 has started" in fixed.said
    del fixed.queue.jobs["1"]
    fixed.growth.look_at_grants(10.0)
    assert fixed.hosts() == ("node0",)
    assert len(fixed.queue.pending) == 3  # another one is asked for
    assert fixed.queue.asked[-1] == ["--exclude=node0"]


def test_a_node_joins_and_leaves_at_the_next_look_where_slurm_or_the_disk_fails_once(
    fixed: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed.growth.look_at_grants(0.0)
    fixed.queue.start("1", "node7")

    def fail(*_: str) -> str:
        raise RunError("Slurm does not answer")

    with monkeypatch.context() as patch:
        patch.setattr("hvd_elastic.engines.slurm.growth.gres_of_nodes", fail)
        with pytest.raises(RunError):
            fixed.growth.look_at_grants(5.0)
    assert fixed.hosts() == ("node0",)
    fixed.growth.look_at_grants(10.0)
    assert fixed.hosts() == ("node0", "node7")
    assert fixed.said.count("node7 joins: job 1 has started") == 1
    del fixed.queue.jobs["1"]
    with monkeypatch.context() as patch:
        patch.setattr(fixed.engine, "_write", fail)
        with pytest.raises(RunError):
            fixed.growth.look_at_grants(15.0)
    fixed.growth.look_at_grants(20.0)
    assert fixed.hosts() == ("node0",)


def test_a_second_allocation_on_the_same_node_is_cancelled(fixed: Setting) -> None:
    fixed.growth.look_at_grants(0.0)
    fixed.queue.start("1", "node7")
    fixed.queue.start("2", "node7")
    fixed.growth.look_at_grants(5.0)
    assert fixed.hosts() == ("node0", "node7")
    assert "2" not in fixed.queue.jobs
    fixed.growth.look_at_grants(10.0)
    assert len(fixed.queue.jobs) == 3
    assert fixed.queue.asked[-1] == ["--exclude=node0,node7"]


def test_the_nodes_that_the_user_excludes_are_not_asked_for(tmp_path: Path) -> None:
    setting = Setting(tmp_path, SPEC, "-x bad[1-2]", "--exclude=bad4")
    setting.growth.look_at_grants(0.0)
    assert setting.queue.asked[-1] == ["--exclude=bad[1-2],bad4,node0"]


def test_the_nodes_that_the_user_names_are_asked_for_one_by_one(tmp_path: Path) -> None:
    setting = Setting(tmp_path, SPEC, "--nodelist=node0,node[5-6]")
    setting.growth.look_at_grants(0.0)
    named = [options[1:] for options in setting.queue.asked]
    assert named == [["--nodelist=node5"], ["--nodelist=node6"], []]
    setting.queue.start("1", "node5")
    del setting.queue.jobs["3"]
    setting.growth.look_at_grants(5.0)
    assert setting.queue.asked[-1] == ["--exclude=node0,node5"]  # node6 is asked for already


def test_the_jobs_of_a_run_of_the_same_name_with_another_home_are_left_alone(
    fixed: Setting,
) -> None:
    other = "/home/ann/other/runs/resnet/slurm/further.sh"
    fixed.queue.start("80", "node8", script=other)
    fixed.queue.wait("90", script=other)
    fixed.growth.adopt()
    fixed.growth.look_at_grants(0.0)
    assert fixed.hosts() == ("node0",)
    assert len(fixed.queue.jobs) == 5
    give_back(OURS, fixed.queue)
    assert [*fixed.queue.jobs] == ["80", "90"]


def test_an_allocation_that_is_nearly_over_does_not_take_the_place_of_a_fresh_one(
    fixed: Setting,
) -> None:
    fixed.queue.start("8", "node8", "2:30")
    fixed.growth.adopt()
    assert fixed.hosts() == ("node0",)
    fixed.growth.look_at_grants(0.0)
    assert "8" not in fixed.queue.jobs
    assert len(fixed.queue.pending) == 3


def test_a_node_is_used_by_its_next_allocation(fixed: Setting) -> None:
    fixed.growth.look_at_grants(0.0)
    fixed.queue.start("1", "node7")
    fixed.growth.look_at_grants(5.0)
    connection = fixed.engine.connect(Host("node7"))
    fixed.queue.start("1", "node7", "2:10")
    fixed.queue.start("2", "node7")
    fixed.growth.look_at_grants(10.0)
    assert "2" in fixed.queue.jobs
    fixed.queue.start("1", "node7", "2:00")
    fixed.growth.look_at_grants(15.0)
    assert fixed.hosts() == ("node0",)  # until nothing of the run is in the first one
    connection.close()
    fixed.growth.look_at_grants(20.0)
    fixed.growth.look_at_grants(25.0)
    assert fixed.hosts() == ("node0", "node7")
    assert [*fixed.queue.jobs] == ["2", "3", "4"]


def test_a_lost_node_of_the_first_allocation_comes_back_by_another_job(fixed: Setting) -> None:
    fixed.event("host_lost", 0.0, host="node0", cause="", silent_s=None)
    fixed.growth.look_at_grants(70.0)
    assert fixed.queue.asked[-1] == []
    fixed.queue.start("1", "node0")
    fixed.growth.look_at_grants(75.0)
    fixed.event("agent_started", 76.0, host="node0", seconds=0.1)
    fixed.growth.look_at_grants(80.0)
    assert fixed.hosts() == ("node0",)
    assert "1" in fixed.queue.jobs
    assert len(fixed.queue.pending) == 3


def test_the_run_leaves_an_allocation_before_its_time_limit(fixed: Setting) -> None:
    fixed.growth.look_at_grants(0.0)
    fixed.queue.start("1", "node7", "3:00")
    fixed.growth.look_at_grants(5.0)
    assert "node7" in fixed.hosts()
    fixed.queue.start("1", "node7", "2:00")
    fixed.growth.look_at_grants(10.0)
    assert fixed.hosts() == ("node0",)
    assert "1" not in fixed.queue.jobs  # nothing of the run was connected to it


def test_an_allocation_is_cancelled_only_when_the_run_has_left_it(fixed: Setting) -> None:
    fixed.growth.look_at_grants(0.0)
    fixed.queue.start("1", "node7")
    fixed.growth.look_at_grants(5.0)
    connection = fixed.engine.connect(Host("node7"))
    fixed.queue.start("1", "node7", "1:00")
    fixed.growth.look_at_grants(10.0)
    assert fixed.hosts() == ("node0",)
    assert "1" in fixed.queue.jobs
    connection.close()
    fixed.growth.look_at_grants(15.0)
    assert "1" not in fixed.queue.jobs


def test_a_lost_node_of_the_first_allocation_is_made_up_for(fixed: Setting) -> None:
    for number, node in (("1", "node1"), ("2", "node2"), ("3", "node3")):
        fixed.growth.look_at_grants(0.0)
        fixed.queue.start(number, node)
    fixed.growth.look_at_grants(5.0)
    fixed.event("host_lost", 10.0, host="node0", cause="", silent_s=None)
    fixed.growth.look_at_grants(40.0)
    assert len(fixed.queue.jobs) == 3
    fixed.growth.look_at_grants(70.0)
    assert fixed.queue.pending == ["4"]
    fixed.queue.start("4", "node4")
    fixed.growth.look_at_grants(75.0)
    assert "node4" in fixed.hosts()
    fixed.event("agent_started", 76.0, host="node0", seconds=0.1)
    fixed.growth.look_at_grants(80.0)  # then there is one too many
    assert "node4" not in fixed.hosts()
    assert "4" not in fixed.queue.jobs


def test_a_further_node_that_stays_lost_is_given_back(fixed: Setting) -> None:
    fixed.growth.look_at_grants(0.0)
    fixed.queue.start("1", "node7")
    fixed.growth.look_at_grants(5.0)
    fixed.event("host_lost", 10.0, host="node7", cause="", silent_s=None)
    fixed.growth.look_at_grants(71.0)
    assert fixed.hosts() == ("node0",)
    assert "1" not in fixed.queue.jobs


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("host_draining", {"host": "node7", "cause": "c", "leave_in_s": 120.0, "asked": False}),
        ("warning", {"message": "m", "host_at_risk": "node7"}),
    ],
)
def test_another_node_is_asked_for_before_one_goes_that_drains_or_is_at_risk(
    fixed: Setting, kind: str, fields: dict[str, Any]
) -> None:
    fixed.growth.look_at_grants(0.0)
    for number, node in (("1", "node7"), ("2", "node8"), ("3", "node9")):
        fixed.queue.start(number, node)
    fixed.growth.look_at_grants(5.0)
    assert not fixed.queue.pending
    fixed.event(kind, 6.0, **fields)
    fixed.growth.look_at_grants(10.0)
    assert len(fixed.queue.pending) == 1
    assert fixed.hosts() == ("node0", "node7", "node8", "node9")
    del fixed.queue.jobs["1"]
    fixed.growth.look_at_grants(15.0)
    assert len(fixed.queue.pending) == 1
    assert fixed.hosts() == ("node0", "node8", "node9")


@pytest.mark.parametrize(
    ("used", "waiting", "elastic", "asked"),
    [
        ((), 0, False, 0),
        (("node0",), 0, False, 0),
        (("node0",), 0, True, 1),
        ((), 1, False, 1),
        (("node0",), 3, True, 3),
    ],
)
def test_a_cluster_asks_for_more_while_jobs_wait_or_can_use_more(
    goodput: Setting, used: tuple[str, ...], waiting: int, elastic: bool, asked: int
) -> None:
    goodput.growth.note_use(used, (), 0.0, waiting=waiting, elastic=elastic)
    goodput.growth.look_at_grants(0.0)
    assert len(goodput.queue.pending) == asked


def test_the_wanted_number_of_processes_limits_the_nodes(tmp_path: Path) -> None:
    setting = Setting(tmp_path, replace(SPEC, np=3))
    setting.growth.look_at_grants(0.0)
    assert len(setting.queue.jobs) == 1
    setting.event("command_done", 1.0, id="1", op="scale", ok=True, np=7, message="")
    setting.growth.look_at_grants(5.0)
    assert len(setting.queue.jobs) == 3
    for number in ("1", "2", "3"):
        setting.queue.start(number, f"node{number}")
    setting.growth.look_at_grants(10.0)
    assert setting.hosts() == ("node0", "node1", "node2", "node3")
    setting.event("command_done", 11.0, id="2", op="scale", ok=True, np=3, message="")
    setting.growth.look_at_grants(15.0)
    assert setting.hosts() == ("node0", "node1")
    assert [*setting.queue.jobs] == ["1"]


def test_a_policy_gets_one_node_at_a_time_while_it_uses_all(goodput: Setting) -> None:
    goodput.growth.look_at_grants(0.0)
    assert not goodput.queue.jobs  # nothing trains yet
    goodput.trains_on("node0")
    goodput.growth.look_at_grants(5.0)
    goodput.growth.look_at_grants(10.0)
    assert goodput.queue.pending == ["1"]
    goodput.queue.start("1", "node1")
    goodput.growth.look_at_grants(15.0)
    goodput.growth.look_at_grants(20.0)
    assert not goodput.queue.pending
    goodput.trains_on("node0", "node1", now=25.0)
    goodput.growth.look_at_grants(30.0)
    assert goodput.queue.pending == ["2"]


def test_a_drain_that_is_read_after_its_node_has_left_does_not_bar_the_next_one(
    fixed: Setting,
) -> None:
    fixed.growth.look_at_grants(0.0)
    fixed.queue.start("1", "node7")
    fixed.growth.look_at_grants(5.0)
    del fixed.queue.jobs["1"]
    fixed.growth.look_at_grants(10.0)
    drains = {"cause": "preempted", "leave_in_s": 5.0, "asked": False}
    fixed.event("host_draining", 10.0, host="node7", **drains)
    fixed.event("warning", 10.0, message="it may go", host_at_risk="node7")
    fixed.queue.start("2", "node7")
    fixed.growth.look_at_grants(15.0)
    assert "node7" in fixed.hosts()
    assert not fixed.growth.at_risk


def test_an_unused_node_is_kept_as_long_as_another_one_takes_to_start(goodput: Setting) -> None:
    goodput.growth._owner.start_s = 200.0
    goodput.trains_on("node0")
    goodput.growth.look_at_grants(0.0)
    goodput.queue.start("1", "node1")
    goodput.growth.look_at_grants(5.0)
    for now, is_there in ((150.0, True), (206.0, False)):
        goodput.growth.look_at_grants(now)
        assert ("node1" in goodput.hosts()) is is_there


@pytest.mark.parametrize("end", ["worker_standby", "worker_left", "host_lost", "run_started"])
def test_a_node_counts_as_unused_only_when_its_workers_are_warm(goodput: Setting, end: str) -> None:
    goodput.trains_on("node0")
    goodput.growth.look_at_grants(0.0)
    goodput.queue.start("1", "node1")
    goodput.growth.look_at_grants(10.0)
    goodput.event("worker_started", 20.0, host="node1", local_rank=0)
    for now in (100.0, 500.0):
        goodput.growth.look_at_grants(now)
        assert goodput.hosts() == ("node0", "node1")
        assert not goodput.queue.pending  # no further one before it is used
    worker = {"host": "node1", "local_rank": 0}
    fields = {"host_lost": {"host": "node1"}, "run_started": {}}.get(end, worker)
    goodput.event(end, 501.0, **fields)
    goodput.event("agent_started", 502.0, host="node1", seconds=0.1)
    goodput.growth.look_at_grants(595.0)
    assert goodput.hosts() == ("node0", "node1")
    goodput.growth.look_at_grants(602.0)
    assert goodput.hosts() == ("node0",)


def test_a_node_that_the_policy_leaves_unused_is_given_back(goodput: Setting) -> None:
    goodput.trains_on("node0")
    goodput.growth.look_at_grants(0.0)
    goodput.queue.start("1", "node1")
    goodput.growth.look_at_grants(10.0)
    goodput.growth.look_at_grants(109.0)
    assert goodput.hosts() == ("node0", "node1")
    goodput.growth.look_at_grants(111.0)
    assert goodput.hosts() == ("node0",)
    assert not goodput.queue.jobs
    # It asks again after a pause of five times as long, and then of twice that.
    goodput.growth.look_at_grants(600.0)
    assert not goodput.queue.jobs
    goodput.growth.look_at_grants(612.0)
    assert goodput.queue.pending == ["2"]


def test_a_pending_request_is_withdrawn_when_the_policy_leaves_a_node(goodput: Setting) -> None:
    goodput.trains_on("node0")
    goodput.growth.look_at_grants(0.0)
    goodput.queue.start("1", "node1")
    goodput.growth.look_at_grants(5.0)
    goodput.trains_on("node0", "node1", now=6.0)
    goodput.growth.look_at_grants(10.0)
    assert goodput.queue.pending == ["2"]
    goodput.trains_on("node0", now=11.0)
    goodput.growth.look_at_grants(15.0)
    assert not goodput.queue.pending


def test_the_next_leader_takes_the_allocations_that_are_there(fixed: Setting) -> None:
    fixed.queue.start("8", "node8")
    fixed.queue.wait("9")
    fixed.growth.adopt()
    assert fixed.hosts() == ("node0", "node8")
    fixed.growth.look_at_grants(0.0)
    assert len(fixed.queue.jobs) == 3


def test_at_the_end_all_are_given_back(fixed: Setting) -> None:
    fixed.growth.look_at_grants(0.0)
    fixed.queue.start("1", "node1")
    give_back(OURS, fixed.queue)
    assert not fixed.queue.jobs
