"""A run on a cloud asks for machines on demand only when its deadline forces it."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_elastic.engines.cloud import engine
from hvd_elastic.engines.cloud.engine import CloudHosts
from hvd_elastic.engines.cloud.machines import Machines
from hvd_elastic.engines.cloud.provider import CapacityError, Offer, UnsupportedError
from hvd_elastic.engines.cloud.reach import Reach
from hvd_elastic.engines.cloud.records import CloudFolder, Definition
from hvd_elastic.engines.growth import Growth, Limits
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.policy.objective import Objective
from hvd_elastic.run_events import HostDraining, Warned
from hvd_elastic.sim.spot import (
    ON_DEMAND,
    ElasticSpot,
    SpotJob,
    SpotOutcome,
    SpotPool,
    SpotTrace,
)
from tests.unit.engines.cloud.test_machines import POOLS, Cloud
from tests.unit.policy.known_runs import run_events, true_model
from tests.unit.records.made_events import noted

TARGET = 1e6


@pytest.fixture
def cloud() -> Cloud:
    """A cloud that has no spot machines now."""
    found = Cloud()
    found.refusals = {offer.name: CapacityError("none") for offer in POOLS if offer.spot}
    return found


@pytest.fixture
def said() -> list[str]:
    return []


def hosts_of(
    cloud: Cloud,
    said: list[str],
    tmp_path: Path,
    patch: pytest.MonkeyPatch,
    deadline_s: float | None,
) -> CloudHosts:
    patch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    folder = CloudFolder("lab")
    definition = Definition(
        "lab", "memory", {}, ("small",), most=4, spot=True, deadline=time.time() + 36000
    )
    folder.write(definition)
    machines = Machines(folder, cloud, said.append)
    goal = Objective("cost", deadline_s=deadline_s, target=TARGET if deadline_s else None)
    return CloudHosts(tmp_path / "hosts", machines, Reach(definition), said.append, goal)


def train(hosts: CloudHosts, noise_scale: float | None = 1e6, since_s: float = 0.0) -> None:
    """Have the run measure about 400 examples a second on each of two machines.

    Args:
        since_s: time since it has begun.
    """
    limits = {"initial_batch_size": 128, "max_batch_size": 1024}
    limits |= {
        "min_atomic_batch_size": 1,
        "max_atomic_batch_size": 512,
        "max_accumulation_steps": 0,
    }
    model = true_model(0.01, 0.0025, 0.001, 1e-4, 0.002, 1e-4)
    events = run_events(model, [(1,), (1, 1)], (128, 256), limits=limits, noise_scale=noise_scale)
    began = time.time() - since_s - events[0].t
    for event in events:
        event.t += began
        hosts.needs.take_event(event)


def markets(cloud: Cloud) -> Counter[bool]:
    return Counter(each.offer.spot for each in cloud.machines.values())


def test_without_a_deadline_there_is_nothing_on_demand(cloud, said, tmp_path, monkeypatch):
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, None)
    train(hosts)
    with pytest.raises(CapacityError):
        hosts.begin(4, hosts.machines.live())
    assert not cloud.machines


def test_a_deadline_that_is_far_away_forces_nothing(cloud, said, tmp_path, monkeypatch):
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, 30000.0)
    train(hosts, None)
    with pytest.raises(CapacityError):
        hosts.begin(4, hosts.machines.live())
    assert not cloud.machines


@pytest.mark.parametrize("noise_scale", [1e6, None])
def test_a_deadline_that_is_near_forces_machines_on_demand(
    cloud, said, tmp_path, monkeypatch, noise_scale
):
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, 900.0)
    train(hosts, noise_scale)
    hosts.begin(4, hosts.machines.live())
    assert markets(cloud) == {False: 4}
    assert any("4 on demand up to the end: " in each for each in said), said


def test_a_resumed_run_keeps_its_deadline(cloud, said, tmp_path, monkeypatch):
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, 11700.0)
    train(hosts, since_s=10800.0)
    again = {"t": time.time(), "resumed": True}
    noted(SimpleNamespace(note_event=hosts.needs.take_event), "run_started", again, 10800.0)
    hosts.begin(4, hosts.machines.live())
    assert markets(cloud) == {False: 4}


def test_unknown_work_is_measured_on_one_machine_on_demand(cloud, said, tmp_path, monkeypatch):
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, 30000.0)
    hosts.begin(4, hosts.machines.live())
    assert markets(cloud) == {False: 1}
    with pytest.raises(CapacityError):
        hosts.begin(3, hosts.machines.live())
    assert markets(cloud) == {False: 1}


def test_near_the_deadline_nothing_new_is_on_spot_machines(cloud, said, tmp_path, monkeypatch):
    cloud.refusals.clear()
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, 900.0)
    hosts.begin(2, hosts.machines.live())
    train(hosts)
    hosts.begin(2, hosts.machines.live())
    assert markets(cloud) == {True: 2, False: 2}


def test_a_machine_at_risk_counts_as_gone_near_the_deadline(cloud, said, tmp_path, monkeypatch):
    spot, cloud.refusals = cloud.refusals, {}
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, 900.0)
    hosts.begin(4, hosts.machines.live())
    train(hosts)
    cloud.refusals = spot
    machine = next(iter(cloud.machines.values()))
    cloud.machines[machine.id] = replace(machine, address="10.0.0.1")
    with pytest.raises(UnsupportedError, match="4 machines of at most 4 are there"):
        hosts.begin(1, hosts.machines.live())
    hosts.needs.take_event(Warned("it may go", host_at_risk="10.0.0.1"))
    hosts.begin(1, hosts.machines.live())
    assert markets(cloud) == {True: 4, False: 1}


def test_a_run_waits_for_capacity_before_it_begins(cloud, said, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_WAIT_S", 0.02)
    monkeypatch.setenv("HVD_ELASTIC_CLOUD_LEFT_OUT_S", "0.1")
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, None)
    monkeypatch.setattr(hosts._reach, "renew", lambda machines, _: {m.id: "" for m in machines})
    hosts.least, looks = 2, 0
    spec = RunSpec((), "/", policy="goodput")
    growth = Growth(hosts, Limits(4, 1, 0.0, 60.0, least=2), spec, said.append)

    def stopped() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            cloud.refusals.clear()
        return looks > 100

    hosts.begin_with(growth, stopped)
    assert markets(cloud) == {True: 2}
    assert looks >= 3
    assert any("0 of 2 machines can be used: no machine can be had now" in text for text in said), (
        said
    )


def test_the_hostfile_is_empty_while_there_is_no_machine(cloud, said, tmp_path, monkeypatch):
    cloud.refusals.clear()
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, None)
    monkeypatch.setattr(hosts._reach, "renew", lambda machines, _: {m.id: "" for m in machines})
    hosts.begin(1, hosts.machines.live())
    (machine,) = cloud.machines.values()
    cloud.machines[machine.id] = replace(machine, address="10.0.0.1")
    (grant,) = hosts.list()
    hosts.join_host(grant)
    assert "10.0.0.1" in (tmp_path / "hosts").read_text()
    hosts.leave_host(grant.grant_id)
    assert not (tmp_path / "hosts").read_text().strip()


def test_a_drained_machine_is_replaced_before_it_ends(cloud, said, tmp_path, monkeypatch):
    cloud.refusals.clear()
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, None)
    hosts.begin(4, hosts.machines.live())
    machine = next(iter(cloud.machines.values()))
    cloud.machines[machine.id] = replace(machine, address="10.0.0.1")
    hosts.needs.take_event(HostDraining("10.0.0.1", "preempted", 120.0, asked=False))
    hosts.begin(1, hosts.machines.live())
    assert markets(cloud) == {True: 5}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("deadline_h", [0.1, 100.0])
def test_a_run_asks_for_the_machines_that_the_simulation_has(
    cloud, said, tmp_path, monkeypatch, seed, deadline_h
):
    rng = random.Random(seed)
    machines, free = 4, [rng.randrange(4) for _ in range(3)]
    prices = [rng.choice([0.3, 0.33, 0.4, 0.6, 1.2]) for _ in free]
    pools = [SpotPool(f"{n}", (free[n],), (prices[n],)) for n in range(len(free))]
    trace, job = SpotTrace(300.0, tuple(pools)), SpotJob(machines, 1.0, deadline_h)
    simulated = ElasticSpot(trace, job)
    simulated.tick(0, 0.0, SpotOutcome())

    spot = [Offer("small", pool.name, spot=True, price=pool.prices[0]) for pool in pools]
    cloud.refusals.clear()
    cloud.pools = [*spot, Offer("small", "0", price=trace.on_demand)]
    cloud.free = dict(zip(spot, free, strict=True))
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, deadline_h * 3600)
    monkeypatch.setattr(hosts.needs, "_work_s", lambda *_: 3600.0)
    with contextlib.suppress(CapacityError):
        hosts.begin(machines, hosts.machines.live())
    names = {offer: offer.zone if offer.spot else str(ON_DEMAND) for offer in cloud.pools}
    ours = Counter(names[each.offer] for each in cloud.machines.values())
    assert ours == Counter(map(str, simulated.held()))
