"""Machines of a cloud are started, trained on and ended, and nothing is left running."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.bodies import Bodies
from hvd_elastic.hosts.hostfile import parse_hostfile
from hvd_elastic.virtual import VirtualCluster
from tests.dist.running import RunningJob, Stage
from tests.engines.markets import Ec2, Market, Rack
from tests.paths import ALL, COSTLY, LIMIT_S

pytestmark = [pytest.mark.dist, pytest.mark.root]

KILLS = 20 if ALL else 3
long = pytest.mark.parametrize(
    "clean_market", [pytest.param("command", marks=COSTLY), "aws"], indirect=True, scope="module"
)
"""Marks tests that take long: with programs of the user they are costly variants."""


@pytest.fixture(scope="module", params=["command", "aws"])
def clean_market(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Market]:
    home, shared = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("shared")
    if request.param == "aws":
        for module in ("boto3", "moto.server"):
            pytest.importorskip(module, reason="see make test-engines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_ELASTIC_HOME", str(home))
        cluster = VirtualCluster.up(4, 1, name=f"rack-{request.param}", shares=[shared])
    with cluster:
        if cluster.loopback:
            pytest.skip("the machines of a cloud are hosts in network namespaces, which need root")
        if request.param == "command":
            yield Rack(cluster, home, shared)
            return
        from benchmarks.testbed.cloud import Cloud

        with Cloud(Bodies(cluster)) as cloud:
            yield Ec2(cluster, home, shared, cloud)


@pytest.fixture
def market(clean_market: Market) -> Iterator[Market]:
    yield clean_market
    clean_market.end_all()


class CloudJob(RunningJob):
    """A run on the machines of a cloud, with the known hosts of ``hvd-elastic cloud``."""

    def __init__(self, market: Market, *options: str, script_options: tuple[str, ...] = ()) -> None:
        self.market = market
        self.home_name = str(market.home)
        stage = Stage(market.cluster, market.shared)
        super().__init__(stage, None, *options, script_options=script_options)

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self.market.environment, **self.trains}

    @property
    def trains(self) -> dict[str, str]:
        """Variables of programs that train."""
        return {name: super(CloudJob, self).environment()[name] for name in ("PYTHONPATH",)}


def up(market: Market, name: str, *more: str) -> list[str]:
    return market.up_options(name, "--max-hours", "1", *more)


def test_machines_start_train_and_end(market: Market, tmp_path: Path) -> None:
    theirs = market.start_bystander()
    hosts = tmp_path / "hosts"
    market.call(*up(market, "lab", "--instances", "2", "--hostfile", str(hosts)))
    ours = market.hosts_on() - {theirs}
    assert len(ours) == 2
    listed = parse_hostfile(hosts)
    assert {host.name for host in listed} == {market.cluster.address(host) for host in ours}
    assert all(host.price for host in listed)
    rows = json.loads(market.call("list", "--json").stdout)
    assert [(row["cloud"], row["state"]) for row in rows] == [("lab", "running")] * 2
    where = ("--hostfile", str(hosts), "--ssh-config", str(market.ssh_config))
    with CloudJob(market, *where) as job:
        job.wait_size(2)
        job.wait_steps(5)
        job.finish_leaving_files()
    assert "2 machines ended" in market.call("down", "lab").stdout
    assert market.hosts_on() == {theirs}
    assert not json.loads(market.call("list", "--json").stdout)
    assert "no cloud is named lab" in market.call("down", "lab", status=1).stderr


def test_a_plan_starts_nothing_and_names_the_cost(market: Market) -> None:
    plan = market.call(*up(market, "lab", "--instances", "2-3", "--spot", "--dry-run"))
    assert "Nothing was started" in plan.stdout
    assert "3 machines" in plan.stdout
    assert not market.hosts_on()
    assert not (market.home / "clouds").exists()


def moments(kind: str, number: int, within_s: float) -> list[float]:
    rng = random.Random(f"{kind}")
    return [rng.uniform(0.0, within_s) for _ in range(number)]


def kill_after(process: subprocess.Popen[str], after_s: float) -> None:
    time.sleep(after_s)
    process.kill()
    process.communicate()


@pytest.mark.timeout(60 * KILLS + 1800)
@long
def test_up_that_is_killed_leaves_nothing_that_down_does_not_end(market: Market) -> None:
    theirs = market.start_bystander()
    began = time.monotonic()
    market.call(*up(market, "whole", "--instances", "2"))
    took_s = time.monotonic() - began
    market.call("down", "whole")
    for number, after_s in enumerate(moments("up", KILLS, took_s)):
        name = f"lab{number}"
        kill_after(market.start(*up(market, name, "--instances", "2")), after_s)
        if (market.home / "clouds" / name / "cloud.json").exists():
            market.call("down", name)
        assert market.hosts_on() == {theirs}, f"killed after {after_s:.2f} s"


@pytest.mark.timeout(60 * KILLS + 1800)
@long
def test_down_that_is_killed_can_be_repeated(market: Market) -> None:
    theirs = market.start_bystander()
    for number, after_s in enumerate(moments("down", KILLS, 3.0)):
        market.call(*up(market, f"lab{number}", "--instances", "1"))
        kill_after(market.start("down", f"lab{number}"), after_s)
        if (market.home / "clouds" / f"lab{number}").exists():
            market.call("down", f"lab{number}")
        assert market.hosts_on() == {theirs}, f"killed after {after_s:.2f} s"


@long
def test_machines_whose_leader_is_gone_end_with_their_lease(market: Market) -> None:
    theirs = market.start_bystander()
    market.settings["LEASE"] = 8.0
    process = market.start(*up(market, "lab", "--instances", "2"))
    market.wait_hosts(lambda found: len(found) > 1)
    process.kill()
    process.communicate()
    assert market.wait_hosts(lambda found: len(found) == 1) == {theirs}
    assert "none is left" in market.call("down", "lab").stdout


@long
def test_machines_end_at_their_deadline_and_down_expired_forgets_them(market: Market) -> None:
    theirs = market.start_bystander()
    deadline = ("--max-hours", str(40 / 3600))
    market.call(*market.up_options("lab", *deadline, "--instances", "1"))
    assert market.wait_hosts(lambda found: len(found) == 1) == {theirs}
    market.call("down", "--expired")
    assert not json.loads(market.call("list", "--json").stdout)


def test_a_machine_that_was_ended_by_hand_is_replaced_by_up_and_no_error_for_down(
    market: Market,
) -> None:
    market.call(*up(market, "lab", "--instances", "2"))
    market.end_by_hand(min(market.hosts_on()))
    market.call(*up(market, "lab", "--instances", "2"))
    market.wait_ended()
    assert len(market.hosts_on()) == 2
    market.end_by_hand(min(market.hosts_on()))
    market.call("down", "lab")
    assert not market.hosts_on()


def test_a_name_that_another_user_has_is_refused(market: Market) -> None:
    theirs = market.start_bystander(cloud="lab", owner="eve@elsewhere")
    refused = market.call(*up(market, "lab", "--instances", "1"), status=1)
    assert "the name lab is in use: 1 machine of eve@elsewhere" in refused.stderr
    down = market.call("down", "lab", *market.provider, status=1)
    assert "eve@elsewhere" in down.stderr
    assert market.hosts_on() == {theirs}


def test_ctrl_c_before_the_first_answer_leaves_nothing(market: Market) -> None:
    theirs = market.start_bystander()
    process = market.start(*up(market, "lab", "--instances", "2"))
    market.wait_hosts(lambda found: len(found) > 1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert market.wait_hosts(lambda found: len(found) == 1) == {theirs}
    assert not json.loads(market.call("list", "--json").stdout)


def test_a_run_asks_for_its_machines_and_gives_them_back(market: Market) -> None:
    theirs = market.start_bystander()
    market.call(*up(market, "lab", "--instances", "1-2", "--no-start"))
    assert market.hosts_on() == {theirs}
    with CloudJob(market, "--cloud", "lab") as job:
        job.wait_size(2)
        job.wait_steps(5)
        lost = min(market.hosts_on() - {theirs})
        since = job.mark()
        market.end_by_hand(lost)
        job.wait_event("rescale_finished", since)  # it is lost, or seen to end in time
        job.wait_size(2, since)
        job.finish_leaving_files()
    assert market.hosts_on() == {theirs}
    market.call("down", "lab")


@long
def test_a_cluster_asks_for_machines_while_jobs_wait_and_ends_what_they_leave(
    market: Market,
) -> None:
    def ours(*words: str) -> None:
        command = [sys.executable, "-m", "hvd_elastic.cli.app", *words]
        subprocess.run(command, env=market.environment, check=True, timeout=LIMIT_S)

    theirs = market.start_bystander()
    market.settings["GIVE_BACK"] = 5.0
    market.call(*up(market, "lab", "--instances", "1-2", "--no-start"))
    ours("up", "--cloud", "lab", "--detach")
    try:
        assert len(market.hosts_on()) == 2
        for _ in range(2):  # each takes the slot of one machine
            ours("submit", "--plain", "--", "sleep", "15")
        market.wait_hosts(lambda found: len(found) == 3)
        market.wait_hosts(lambda found: len(found) == 2)
    finally:
        ours("down")
    assert market.hosts_on() == {theirs}


@pytest.mark.timeout(90 * KILLS + 1800)
@long
def test_a_run_that_is_killed_leaves_machines_only_as_long_as_their_lease(market: Market) -> None:
    theirs = market.start_bystander()
    market.settings["LEASE"] = 10.0
    for number, after_s in enumerate(moments("run", KILLS, 15.0)):
        name = f"lab{number}"
        market.call(*up(market, name, "--instances", "1-2", "--no-start"))
        with CloudJob(market, "--cloud", name) as job:
            time.sleep(after_s)
            job.process.kill()
            job.process.wait()
            found = market.wait_hosts(lambda found: len(found) == 1)
            assert found == {theirs}, f"killed after {after_s:.2f} s"
        market.call("down", name)


# -- what EC2 does when it cannot or will not ------------------------------------------------------


@pytest.fixture
def ec2(market: Market) -> Ec2:
    if not isinstance(market, Ec2):
        pytest.skip("of EC2 alone")
    return market


ZONES = ("--zone", "us-east-1a,us-east-1b")


def test_a_zone_without_capacity_is_left_for_the_next_one(ec2: Ec2) -> None:
    ec2.cloud.capacity = {("g5.xlarge", "us-east-1a", False): 1}
    ec2.cloud.calls.clear()
    told = ec2.call(*up(ec2, "lab", *ZONES, "--instances", "3")).stderr
    zones = sorted(each.pool[1] for each in ec2.cloud.live())
    assert zones == ["us-east-1a", "us-east-1b", "us-east-1b"]
    assert "g5.xlarge in us-east-1a: it had 1 of 3" in told
    assert [action for action, _ in ec2.cloud.calls].count("RunInstances") == 2
    ec2.call("down", "lab")


def test_an_order_whose_answer_is_lost_starts_nothing_twice(ec2: Ec2) -> None:
    left = ["RunInstances"] * 4

    def fail(action: str) -> None:
        if action in left:
            left.remove(action)
            raise ConnectionResetError("the answer is lost")

    ec2.cloud.before_answer = fail
    ec2.call(*up(ec2, "lab", "--instances", "2"))
    assert len(ec2.cloud.live()) == 2
    assert len(left) < 4
    ec2.call("down", "lab")


def test_calls_that_are_throttled_are_repeated_and_not_hammered(ec2: Ec2) -> None:
    ec2.cloud.calls.clear()
    ec2.cloud.throttle = 3
    ec2.call("list", "--provider", "aws", "--region", "us-east-1", "--all", status=1)
    assert len(ec2.cloud.calls) <= 3


def test_a_notice_drains_a_spot_machine_and_another_one_takes_its_place(ec2: Ec2) -> None:
    ec2.call(*up(ec2, "lab", *ZONES, "--spot", "--instances", "1-2", "--no-start"))
    with CloudJob(ec2, "--cloud", "lab") as job:
        job.wait_size(2)
        job.wait_steps(5)
        since = job.mark()
        gone, noticed = ec2.cloud.live()[0], time.time()
        ec2.cloud.interrupt(gone, LIMIT_S)
        drained = job.wait_event("host_drained", since)
        assert drained["host"] == ec2.cluster.address(gone.host)
        assert drained["t"] > noticed
        job.wait_for(lambda: gone.ended is not None, "its end: nobody uses it any more")
        job.wait_size(2, since)
        assert not job.kinds("host_lost", since)
        job.finish_leaving_files()
    assert not ec2.cloud.live()
    ec2.call("down", "lab")


def test_a_recommendation_to_rebalance_brings_another_machine_before_the_notice(ec2: Ec2) -> None:
    ec2.call(*up(ec2, "lab", *ZONES, "--spot", "--instances", "1-2", "--no-start"))
    with CloudJob(ec2, "--cloud", "lab") as job:
        job.wait_size(2)
        first = ec2.cloud.live()
        ec2.cloud.recommend_rebalance(first[0])
        job.wait_for(lambda: len(job.kinds("agent_started")) == 3, "a third machine")
        assert first[0].ended is None
        since = job.mark()
        ec2.cloud.interrupt(first[0], LIMIT_S)
        job.wait_event("host_drained", since)
        job.wait_size(2, since)
        job.finish_leaving_files()
    assert not ec2.cloud.live()
    ec2.call("down", "lab")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("credentials", "expired", "the credentials have expired"),
        ("credentials", "unknown", "the keys are not valid"),
        ("regions_off", {"us-east-1"}, "the region is not enabled"),
        ("clock_off_s", 7200.0, "the clock of this computer is wrong"),
        ("quota", {False: 0}, "ask for a higher quota"),
        ("capacity", {("g5.xlarge", "us-east-1a", False): 0}, "sufficient g5.xlarge capacity"),
        ("unsupported", {("g5.xlarge", "us-east-1a")}, "not supported"),
    ],
)
def test_what_ec2_refuses_is_said_and_leaves_nothing(ec2: Ec2, setting, value, words) -> None:
    setattr(ec2.cloud, setting, value)
    told = ec2.call(*up(ec2, "lab", "--instances", "1"), status=1).stderr
    assert words in told
    assert not ec2.cloud.live()
    ec2.cloud.reset()
    assert not json.loads(ec2.call("list", "--json").stdout)


def test_a_type_that_does_not_exist_is_said(ec2: Ec2) -> None:
    told = ec2.call(*up(ec2, "lab", "--type", "g5.huge", "--instances", "1"), status=1).stderr
    assert "do not exist: [g5.huge]" in told


def test_without_credentials_nothing_is_asked(ec2: Ec2) -> None:
    ec2.without = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    told = ec2.call(*up(ec2, "lab", "--instances", "1"), status=1).stderr
    assert "no credentials" in told


@pytest.mark.parametrize(
    ("fault", "words"), [("cut", "Is port 22 open"), ("no python", "there is no python3")]
)
def test_machines_that_cannot_be_used_are_ended(ec2: Ec2, fault, words) -> None:
    if fault == "cut":  # which is known at the limit
        ec2.settings["START_LIMIT"] = 30.0
    ec2.cloud.bodies.fault = fault
    told = ec2.call(*up(ec2, "lab", "--instances", "1"), status=1).stderr
    assert words in told
    assert not ec2.cloud.live()
