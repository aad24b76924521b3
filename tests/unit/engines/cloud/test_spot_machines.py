"""A run on a cloud asks for machines on demand only when its deadline forces it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_elastic.engines.cloud.engine import CloudHosts
from hvd_elastic.engines.cloud.machines import Machines
from hvd_elastic.engines.cloud.provider import CapacityError
from hvd_elastic.engines.cloud.reach import Reach
from hvd_elastic.engines.cloud.records import CloudFolder, Definition
from hvd_elastic.policy.objective import Objective
from hvd_elastic.run_events import Warned
from tests.unit.engines.cloud.test_machines import POOLS, Cloud
from tests.unit.policy.known_runs import run_events, true_model

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


def train(hosts: CloudHosts, noise_scale: float | None = 1e6) -> None:
    """Have the run measure about 400 examples a second on each of two machines."""
    limits = {"initial_batch_size": 128, "max_batch_size": 1024}
    limits |= {
        "min_atomic_batch_size": 1,
        "max_atomic_batch_size": 512,
        "max_accumulation_steps": 0,
    }
    model = true_model(0.01, 0.0025, 0.001, 1e-4, 0.002, 1e-4)
    events = run_events(model, [(1,), (1, 1)], (128, 256), limits=limits, noise_scale=noise_scale)
    began = time.time() - events[0].t
    for event in events:
        event.t += began
        hosts.take_event(event)


def markets(cloud: Cloud) -> Counter[bool]:
    return Counter(each.offer.spot for each in cloud.machines.values())


def test_without_a_deadline_there_is_nothing_on_demand(cloud, said, tmp_path, monkeypatch):
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, None)
    train(hosts)
    with pytest.raises(CapacityError):
        hosts.begin(4)
    assert not cloud.machines


def test_a_deadline_that_is_far_away_forces_nothing(cloud, said, tmp_path, monkeypatch):
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, 30000.0)
    train(hosts, None)
    with pytest.raises(CapacityError):
        hosts.begin(4)
    assert not cloud.machines


@pytest.mark.parametrize("noise_scale", [1e6, None])
def test_a_deadline_that_is_near_forces_machines_on_demand(
    cloud, said, tmp_path, monkeypatch, noise_scale
):
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, 900.0)
    train(hosts, noise_scale)
    hosts.begin(4)
    assert markets(cloud) == {False: 4}
    assert any("4 on demand up to the end: " in each for each in said), said


def test_unknown_work_is_measured_on_one_machine_on_demand(cloud, said, tmp_path, monkeypatch):
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, 30000.0)
    hosts.begin(4)
    assert markets(cloud) == {False: 1}
    with pytest.raises(CapacityError):
        hosts.begin(3)
    assert markets(cloud) == {False: 1}


def test_spot_machines_come_first_also_near_the_deadline(cloud, said, tmp_path, monkeypatch):
    cloud.refusals.clear()
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, 900.0)
    train(hosts)
    hosts.begin(4)
    assert markets(cloud) == {True: 4}


def test_a_machine_at_risk_counts_as_gone_near_the_deadline(cloud, said, tmp_path, monkeypatch):
    spot, cloud.refusals = cloud.refusals, {}
    hosts = hosts_of(cloud, said, tmp_path, monkeypatch, 900.0)
    train(hosts)
    hosts.begin(4)
    cloud.refusals = spot
    machine = next(iter(cloud.machines.values()))
    cloud.machines[machine.id] = replace(machine, address="10.0.0.1")
    with pytest.raises(CapacityError):
        hosts.begin(1)
    hosts.take_event(Warned("it may go", host_at_risk="10.0.0.1"))
    hosts.begin(1)
    assert markets(cloud) == {True: 4, False: 1}
