"""Leases of machines that stay, lost connections, and orders at the end of a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.engines.cloud import engine, reach
from hvd_elastic.engines.cloud.cluster import _leave
from hvd_elastic.engines.cloud.engine import CloudHosts
from hvd_elastic.engines.cloud.machines import LEFT_OUT_S
from hvd_elastic.engines.cloud.provider import (
    CapacityError,
    CloudError,
    CredentialsError,
    Machine,
)
from hvd_elastic.engines.growth import Grant, Growth, Limits
from hvd_elastic.errors import RunError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.hosts.process import Result
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.programs.processes import read_process
from hvd_elastic.run_events import HostLost
from tests.unit.engines.cloud.test_machines import POOLS, SPOT, Cloud
from tests.unit.engines.cloud.test_spot_machines import hosts_of
from tests.waiting import until

LONG_S = 60.0


class Leases:
    """Renews leases; those of ``bad`` fail for so many more times."""

    def __init__(self) -> None:
        self.bad: dict[str, int] = {}

    def renew(self, machines: Sequence[Machine], _: float) -> dict[str, str]:
        found = {}
        for each in machines:
            left = self.bad.get(each.id, 0)
            self.bad[each.id] = left - 1
            found[each.id] = f"host {each.address}: no route" if left > 0 else ""
        return found


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def hosts(
    cloud: Cloud, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CloudHosts:
    monkeypatch.setenv("HVD_ELASTIC_CLOUD_SETTLE_S", "0.1")
    monkeypatch.setattr(engine, "_WAIT_S", 0.01)
    found = hosts_of(cloud, said, tmp_path, monkeypatch, None)
    found.machines.by = "run r1"
    return found


@pytest.fixture
def leases(hosts: CloudHosts, monkeypatch: pytest.MonkeyPatch) -> Leases:
    found = Leases()
    monkeypatch.setattr(hosts._reach, "renew", found.renew)
    return found


def test_jobs_that_continue_hear_which_machines_end_with_their_lease(hosts, leases, said) -> None:
    hosts.begin(2, ())
    leases.bad = {"m0": 100}
    del said[:]
    _leave(hosts, "lab", said.append)
    (text,) = said
    assert text.startswith("jobs continue, but machine m0 will end within 20 m 00 s, since ")
    assert "host 10.0.1.0: no route" in text
    assert "m1" not in text


def test_a_lease_that_is_to_last_is_tried_again_without_the_cloud(
    hosts, leases, cloud, said
) -> None:
    hosts.begin(2, ())
    hosts.list()
    leases.bad = {"m0": 2}

    def fail() -> None:
        raise CloudError("the token has expired")

    cloud.on_its_way = fail
    del said[:]
    _leave(hosts, "lab", said.append)
    assert said == ["jobs continue, so their machines stay: hvd-elastic cloud down lab"]


def test_jobs_that_continue_on_machines_that_nobody_can_list_hear_it(
    hosts, leases, cloud, said
) -> None:
    def fail() -> None:
        raise CloudError("the token has expired")

    cloud.on_its_way = fail
    _leave(hosts, "lab", said.append)
    (text,) = said
    assert text.startswith("jobs continue, but the machines will end within 20 m 00 s")
    assert "the token has expired" in text


def answer(patch: pytest.MonkeyPatch, status: int) -> None:
    """Have all machines answer each command with an exit status."""

    class Answering:
        host = Host("10.0.1.0")

        def run(self, *_: Any, **__: Any) -> Result:
            return Result(status, b"", b"", 0.0)

        def close(self) -> None:
            pass

    @contextlib.contextmanager
    def connect(*_: object) -> Iterator[Answering]:
        yield Answering()

    patch.setattr(reach, "connect", connect)
    patch.setattr(reach.Reach, "_trust", lambda *_: None)


@pytest.mark.parametrize(("status", "unfit", "why"), [(-1, set(), "lost"), (127, {"m0"}, "image")])
def test_only_a_machine_that_answers_is_unfit(
    hosts, monkeypatch: pytest.MonkeyPatch, status: int, unfit: set[str], why: str
) -> None:
    answer(monkeypatch, status)
    hosts.begin(1, ())
    found = hosts._reach.renew(hosts.machines.live(), 60.0)
    assert why in found["m0"]
    assert hosts._reach.unfit == unfit


@pytest.fixture
def of_cloud_up(hosts, cloud, leases) -> list[Grant]:
    """Two machines of ``cloud up`` that a run uses."""
    hosts.machines.by = ""  # as cloud up
    hosts.begin(2, ())
    hosts.machines.by = "run r1"
    grants = hosts.list()
    for grant in grants:
        hosts.join_host(grant)
    return grants


def test_a_machine_of_cloud_up_that_is_not_needed_stays_and_is_used_again(
    hosts, cloud, of_cloud_up
) -> None:
    hosts.begin(1, hosts.machines.live())
    hosts.list()
    hosts.cancel(["m0", "m2"])
    assert cloud.live == {"m0", "m1"}
    orders = len(cloud.orders)
    hosts.ask((), "")  # growth still has m0 in mind as one that goes
    assert len(cloud.orders) == orders + 1
    assert [each.grant_id for each in hosts.list()] == ["m1", "m3"]
    hosts.ask((), "")
    assert {each.grant_id: each.runs for each in hosts.list()}["m0"]
    assert len(cloud.orders) == orders + 1
    hosts.end()
    assert cloud.live == {"m0", "m1"}


def test_a_spare_machine_of_cloud_up_that_cannot_be_reached_any_more_is_ended(
    hosts, leases, cloud, of_cloud_up, said
) -> None:
    hosts.cancel(["m0"])
    hosts.list()
    leases.bad = {"m0": 1000}
    hosts._start_limit_s = 0.0
    hosts.ask((), "")
    assert [each.grant_id for each in hosts.list()] == ["m1"]
    assert cloud.live == {"m1"}
    assert said[-1].startswith("machine m0 cannot be used, and is ended: host 10.0.1.0: no")


def test_a_spare_machine_of_cloud_up_that_was_prepared_long_ago_is_waited_for(
    hosts, leases, cloud, of_cloud_up
) -> None:
    hosts._prepared["m0"] = time.monotonic() - 3600.0
    hosts.cancel(["m0"])
    hosts.list()
    leases.bad = {"m0": 1}
    hosts.ask((), "")
    assert {each.grant_id: each.runs for each in hosts.list()} == {"m0": False, "m1": True}
    assert {each.grant_id: each.runs for each in hosts.list()} == {"m0": True, "m1": True}


@pytest.mark.parametrize("by", ["run r1", ""])
def test_machines_of_cloud_up_stay_where_this_computer_can_reach_none(
    hosts, cloud, of_cloud_up, said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    hosts.machines.by = by  # of a run, or of cloud up once more
    leases = Leases()
    hosts = CloudHosts(tmp_path / "hosts", hosts.machines, hosts._reach, said.append)
    monkeypatch.setattr(hosts._reach, "renew", leases.renew)
    hosts._start_limit_s = 0.0
    hosts.begin(1, hosts.machines.live())
    leases.bad = dict.fromkeys(("m0", "m1", "m2"), 1000)
    assert [each.grant_id for each in hosts.list()] == ["m0", "m1"]
    hosts._reach.unfit.add("m1")
    hosts.list()
    assert cloud.live == {"m0"}
    del leases.bad["m0"]
    hosts.begin(1, hosts.machines.live())
    leases.bad = {"m0": 1000}
    hosts.list()  # m3 can be reached
    hosts.list()
    assert cloud.live == {"m3"}


def test_a_machine_of_cloud_up_that_is_drained_is_ended(hosts, cloud, of_cloud_up, said) -> None:
    hosts.stop_host("10.0.1.0")
    assert cloud.live == {"m1"}
    assert said[-1] == "10.0.1.0 is drained, so its machine is ended"


def test_a_machine_of_cloud_up_that_is_lost_is_ended_and_replaced_and_a_surplus_one_stays(
    hosts, cloud, of_cloud_up, said, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec((), "/", np=2)
    growth = Growth(hosts, Limits(4, 1, 0.0, 60.0), spec, said.append)
    growth.look_at_grants(0.0)
    growth.read_event(HostLost("10.0.1.0", "no heartbeat", 5.0), 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(hosts, "in_use", lambda each: each == "m0")  # by another job of a cluster
        for now in (61.0, 62.0):
            growth.look_at_grants(now)
        assert "m0" in cloud.live
    growth.look_at_grants(63.0)
    assert "machine m0 is lost, and is ended" in said
    for now in (66.0, 71.0):
        growth.look_at_grants(now)
    assert cloud.live == {"m1", "m2"}
    hosts.machines.by = "run r2"  # so that m2 is another's too
    growth.run.scaled_to = 1
    del said[:]
    for now in (76.0, 81.0, 86.0):
        growth.look_at_grants(now)
    assert said == ["the run leaves 10.0.1.2: it is given back (machine m2)"]
    growth.run.scaled_to = 2
    for now in (91.0, 96.0):
        growth.look_at_grants(now)
    assert said[1:] == [
        "1 further machine asked for",
        "10.0.1.2 joins: machine m2 has started",
    ]
    assert cloud.live == {"m1", "m2"}


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_machine_is_waited_for_as_long_as_its_preparation_takes(
    hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    answer(monkeypatch, 0)
    done = tmp_path / "done"
    command = f"while [ ! -e {done} ]; do sleep 0.05; done"
    hosts._reach._definition = replace(hosts._reach._definition, prepare=command)
    hosts.begin(1, ())
    for _ in range(2):
        assert [each.runs for each in hosts.list()] == [False]
        hosts._since["m0"] -= 3600.0
    answer(monkeypatch, -1)  # it reboots
    done.touch()
    until(lambda: not hosts._reach.preparing)
    assert [each.runs for each in hosts.list()] == [False]
    if comes_back:
        answer(monkeypatch, 0)
        until(lambda: hosts.list()[0].runs)
    else:
        hosts._prepared["m0"] -= 3600.0
        assert hosts.list() == []


def test_the_id_of_a_machine_may_have_slashes(hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 0)
    hosts._reach._definition = replace(hosts._reach._definition, prepare="true")
    machine = Machine("zone/m0", "running", "10.0.1.0", POOLS[0])
    until(lambda: hosts._reach.renew([machine], 60.0) == {"zone/m0": ""})


def test_of_two_machines_with_one_address_the_newer_is_given_up(hosts, leases, cloud, said) -> None:
    hosts.begin(1, ())
    hosts.list()
    hosts.begin(2, hosts.machines.live())
    known = hosts._there["m0"]
    cloud.machines["m1"] = replace(cloud.machines["m1"], address=known.address, port=2222)
    cloud.machines = dict(sorted(cloud.machines.items(), reverse=True))
    assert {each.grant_id for each in hosts.list()} == {"m0", "m2"}
    assert cloud.live == {"m0", "m2"}
    assert "m1 cannot be used, and is ended: machines m0 and m1 have one address, 10" in said[-1]


def test_machines_at_one_address_are_not_ordered_without_end_and_the_error_names_it(
    hosts, leases, cloud, said
) -> None:
    def share_address() -> None:
        for name, each in cloud.machines.items():
            cloud.machines[name] = replace(each, address="10.0.1.0", port=2200 + int(name[1:]))

    cloud.after = share_address
    hosts.least = 2
    hosts._start_limit_s = 0.2
    growth = Growth(hosts, Limits(4, 1, 0.0, 60.0, least=2), RunSpec((), "/"), said.append)
    with pytest.raises(RunError, match=r"1 of 2 machines can be used: machines m0 and m1 have one"):
        hosts.begin_with(growth)
    assert len(cloud.machines) == 2
    hosts._clash = (hosts._clash[0] - LEFT_OUT_S, hosts._clash[1])
    hosts.begin(1, hosts.machines.live())
    assert len(cloud.machines) == 3


@pytest.mark.parametrize("why", ["capacity", "address"])
def test_a_run_begins_with_the_fewest_though_no_more_can_be_had(
    hosts, leases, cloud, said, why: str
) -> None:
    """Two are wanted; it asks for more while it trains."""

    def after() -> None:
        if why == "capacity":
            cloud.refusals = {offer.name: CapacityError("none") for offer in POOLS}
        for name, each in cloud.machines.items():
            port = 2200 + int(name[1:])
            cloud.machines[name] = replace(each, address="10.0.1.0", port=port)

    leases.bad = {"m0": 3}  # it is being booted when the second one is asked for
    cloud.after = after
    hosts._start_limit_s = LONG_S
    limits = Limits(4, 1, 0.0, 60.0, least=1)
    growth = Growth(hosts, limits, RunSpec((), "/", np=2), said.append)
    hosts.begin_with(growth)
    assert [*hosts._joined] == ["m0"]


def test_cloud_up_refuses_two_machines_with_one_address(hosts, leases, cloud) -> None:
    hosts.machines.by = ""
    hosts.begin(2, ())
    cloud.machines["m1"] = replace(cloud.machines["m1"], address="10.0.1.0", port=2222)
    with pytest.raises(CloudError, match=r"m0 and m1 have one address, 10\.0\.1\.0"):
        hosts.list()


def test_a_machine_is_prepared_once_with_the_ssh_configuration_of_its_cloud(
    hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, 0)
    said = tmp_path / "said"
    command = f'echo "with $HVD_ELASTIC_SSH_CONFIG" >> {said}'
    definition = replace(hosts._reach._definition, prepare=command, ssh_config="/the/config")
    hosts.begin(1, ())
    machines = hosts.machines.live()

    def prepare() -> None:
        fresh = reach.Reach(definition)
        until(lambda: fresh.renew(machines, 60.0) == {"m0": ""})

    prepare()
    prepare()  # as a second command or leader
    assert said.read_text() == "with /the/config\n"


def test_the_preparation_of_a_machine_that_has_ended_is_ended(
    hosts, cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, 0)
    child = tmp_path / "child"
    command = f"sleep 3600 & echo $! > {child}; wait; touch {tmp_path}/later; sleep 3600"
    hosts._reach._definition = replace(hosts._reach._definition, prepare=command)
    hosts.begin(1, ())
    hosts.list()
    until(lambda: child.exists() and bool(child.read_text()))
    cloud.stop(["m0"])
    assert hosts.list() == []
    until(lambda: read_process(int(child.read_text())) is None)
    assert hosts._reach._preparing["m0"].returncode
    assert not (tmp_path / "later").exists()


@pytest.mark.parametrize("fault", ["cloud", "disk"])
def test_leases_of_machines_that_train_are_renewed_although_the_cloud_or_the_disk_refuses(
    hosts, cloud, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    renewed: list[str] = []

    def renew(machines: Sequence[Machine], _: float) -> dict[str, str]:
        renewed.extend(each.id for each in machines)
        return {each.id: "" for each in machines}

    def fail(*_: object) -> None:
        raise CredentialsError("the token has expired") if fault == "cloud" else OSError("full")

    monkeypatch.setattr(hosts._reach, "renew", renew)
    hosts.machines.lease_s = 0.0  # due at each look
    hosts.begin(2, ())
    hosts.join_host(hosts.list()[0])
    del renewed[:]
    if fault == "cloud":
        cloud.on_its_way = fail
    else:
        hosts._written = []
        monkeypatch.setattr(engine, "write_hostfile", fail)
    for _ in range(2):
        with pytest.raises((CredentialsError, OSError)):
            hosts.list()
    assert sorted(renewed) == ["m0", "m0", "m1", "m1"]


def test_a_run_that_ends_orders_no_more_machines(hosts, cloud) -> None:
    asked, release = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        asked.set()
        assert release.wait(LONG_S)

    cloud.before = wait
    asking = threading.Thread(target=hosts.machines.start, args=(1, (), SPOT))
    asking.start()
    assert asked.wait(LONG_S)
    ending = threading.Thread(target=hosts.end)
    ending.start()
    ending.join(1.0)  # it waits for the order; else it has ended by now, and misses the machine
    release.set()
    asking.join(LONG_S)
    ending.join(LONG_S)
    assert len(cloud.orders) == 1
    assert not cloud.live
    with pytest.raises(RunError, match="run r1 ends, so it asks for no machine"):
        hosts.machines.start(1, (), SPOT)
    assert len(cloud.orders) == 1
