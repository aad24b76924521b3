from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.tools.check.checks import (
    CheckSettings,
    Level,
    check_clock,
    check_host,
    check_names,
    check_network,
    check_strays,
    choose_reference,
)
from hvd_elastic.tools.check.network import NetLink, all_pairs_in_rounds, slow_links

VERSIONS = {
    "hvd_elastic": "0.1.0",
    "horovod": "0.28.1",
    "horovod build": "torch 2.13.0, patch 0123456789ab",
    "torch": "2.13.0",
    "tensorflow": None,
}
LEADER: dict[str, Any] = {
    "python": "3.11.4",
    "packages": VERSIONS,
    "code": {"train.py": "aa"},
    "package_code": {"__init__.py": "bb"},
}
GPU = {
    "index": "0", "name": "H100", "driver_version": "550.1", "memory.total": "80000",
    "memory.used": "3",
}  # fmt: skip
SETTINGS = CheckSettings(code="/job")
NAMES = [f"gpu{number}" for number in (1, 2, 3, 4)]


def facts(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "name": f"gpu{number}",
        "own_addresses": [f"10.0.0.{number}"],
        "python": "3.11.9",
        "executable": "/usr/bin/python3",
        "packages": VERSIONS,
        "cuda": "12.4",
        "gpus": [GPU, {**GPU, "index": "1"}],
        "gpu_error": None,
        "folders": {"~": {"free": 10 << 30, "refused": None}},
        "memory": {"total": 64 << 30, "available": 60 << 30},
        "nofile": 1024,
        "memlock": -1,
        "infiniband": True,
        "interfaces": {
            "lo": {"addresses": ["127.0.0.1"], "mtu": 65536, "up": True},
            "eth0": {"addresses": [f"10.0.0.{number}"], "mtu": 1500, "up": True},
        },
        "address": f"10.0.0.{number}",
        "resolved": {name: [f"10.0.0.{n}"] for n, name in enumerate(NAMES, start=1)},
        "code": LEADER["code"],
        "package_code": LEADER["package_code"],
        "cpus": 4,
        **changes,
    }


def cluster(settings: CheckSettings = SETTINGS, **changes: Any) -> dict[str, Level]:
    """What is not well on the first of four hosts, which differs in this."""
    everyone = {name: facts(number) for number, name in enumerate(NAMES, start=1)}
    everyone["gpu1"] = facts(1, **changes)
    reference = choose_reference(LEADER, everyone, settings)
    for name in NAMES[1:]:
        assert levels(name, everyone, settings, reference) == {}, "the others are well"
    return levels("gpu1", everyone, settings, reference)


def levels(name: str, everyone: Any, settings: CheckSettings, reference: Any) -> dict[str, Level]:
    checks = check_host(Host(name, slots=2), everyone[name], reference, settings)
    checks += check_names(name, everyone, reference)
    for check in checks:
        assert check.level is Level.OK or ". " in check.detail, "a finding says what to do"
    return {check.name: check.level for check in checks if check.level is not Level.OK}


FAILED, WARNING = Level.FAILED, Level.WARNING
ETH1 = {"eth1": {"addresses": ["10.0.0.1"], "mtu": 1500, "up": True}}
JUMBO = {"eth0": {"addresses": ["10.0.0.1"], "mtu": 9000, "up": True}}
ON_ETH0 = CheckSettings(interface="eth0")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"python": "3.9.2"}, {"python": FAILED}),
        ({"packages": {**VERSIONS, "torch": "2.9.0"}}, {"torch": FAILED}),
        ({"packages": {**VERSIONS, "horovod": None}}, {"horovod": FAILED}),
        ({"packages": {**VERSIONS, "torch": None}}, {"torch": FAILED, "framework": FAILED}),
        ({"packages": {**VERSIONS, "horovod": "broken (X)"}}, {"horovod": FAILED}),
        ({"packages": {**VERSIONS, "tensorflow": "2.21.0"}}, {}),
        ({"packages": {**VERSIONS, "horovod build": "torch 2.9.0"}}, {"horovod build": FAILED}),
        ({"packages": {**VERSIONS, "horovod build": None}}, {"horovod build": FAILED}),
        ({"cuda": "11.8"}, {"cuda": FAILED}),
        ({"cuda": None}, {"cuda": FAILED}),
        ({"gpus": [GPU]}, {"gpus": FAILED}),
        ({"gpus": [], "gpu_error": "GPU is lost"}, {"gpus": FAILED}),
        ({"gpus": []}, {"gpus": FAILED}),
        (
            {"gpus": [{**GPU, "memory.used": "30000"}, {**GPU, "driver_version": "535.9"}]},
            {"gpus": WARNING, "driver": WARNING},
        ),
        ({"code": {"train.py": "other"}}, {"code": FAILED}),
        ({"code": {"train.py": "aa", "more.py": "x"}}, {"code": FAILED}),
        ({"code": None}, {"code": FAILED}),
        ({"package_code": {"__init__.py": "other"}}, {"hvd_elastic code": FAILED}),
        ({"folders": {"~": {"free": 1 << 20, "refused": None}}}, {"folder ~": FAILED}),
        ({"folders": {"~": {"free": 500 << 20, "refused": None}}}, {"folder ~": WARNING}),
        ({"folders": {"~": {"free": 10 << 30, "refused": "Read-only"}}}, {"folder ~": FAILED}),
        ({"memory": {"total": 64 << 30, "available": 1 << 28}}, {"memory": WARNING}),
        ({"nofile": 128}, {"open files": FAILED}),
        ({"nofile": 512}, {"open files": WARNING}),
        ({"nofile": -1}, {}),
        ({"memlock": 65536}, {"locked memory": WARNING}),
        ({"interfaces": ETH1}, {"interface": WARNING}),
        ({"interfaces": JUMBO}, {"mtu": WARNING}),
        ({"cpus": 1}, {"cpus": WARNING}),
        ({"own_addresses": []}, {"own name": WARNING}),
        ({"own_addresses": None}, {"own name": WARNING}),
        ({"resolved": {**facts()["resolved"], "gpu3": []}}, {"names": WARNING}),
        ({"resolved": {**facts()["resolved"], "gpu3": None}}, {"names": WARNING}),
        ({"resolved": {**facts()["resolved"], "gpu3": ["10.0.0.99"]}}, {"names": WARNING}),
    ],
)
def test_one_host_is_other(changes: dict[str, Any], expected: dict[str, Level]) -> None:
    assert cluster(**changes) == expected


def test_the_interface_that_was_asked_for() -> None:
    assert cluster(ON_ETH0) == {}
    assert cluster(ON_ETH0, interfaces=ETH1) == {"interface": FAILED}
    down = {"eth0": {"addresses": ["10.0.0.1"], "mtu": 1500, "up": False}}
    assert cluster(ON_ETH0, interfaces=down) == {"interface": FAILED}


@pytest.mark.parametrize(
    "changes", [{"gpus": [GPU]}, {"gpus": []}, {"gpus": [], "gpu_error": "GPU is lost"}]
)
def test_gpus_do_not_matter_to_a_job_on_processors(changes: dict[str, Any]) -> None:
    assert cluster(replace(SETTINGS, gpus=False), **changes) == {}


def test_what_the_leader_lacks_is_compared_among_the_hosts() -> None:
    leader = {**LEADER, "packages": dict.fromkeys(VERSIONS), "code": None}
    everyone = {name: facts(number) for number, name in enumerate(NAMES, start=1)}
    everyone["gpu4"]["packages"] = {**VERSIONS, "torch": "2.9.0"}
    reference = choose_reference(leader, everyone, SETTINGS)
    assert levels("gpu1", everyone, SETTINGS, reference) == {}
    assert levels("gpu4", everyone, SETTINGS, reference) == {"torch": FAILED}
    nowhere = {"gpu1": facts(packages={**VERSIONS, "horovod": None})}
    reference = choose_reference(leader, nowhere, SETTINGS)
    assert levels("gpu1", nowhere, SETTINGS, reference) == {"horovod": FAILED}


def test_names_that_only_ssh_knows_are_no_fault() -> None:
    everyone = {name: facts(resolved={other: [] for other in NAMES}) for name in NAMES}
    reference = choose_reference(LEADER, everyone, SETTINGS)
    assert levels("gpu1", everyone, SETTINGS, reference) == {}


@pytest.mark.parametrize(
    ("skew", "doubt", "level"),
    [(0.2, 0.0, Level.OK), (1.5, 0.1, WARNING), (-1.5, 0.1, WARNING), (1.5, 0.6, Level.OK)],
)
def test_a_clock_counts_as_wrong_when_that_is_sure(skew: float, doubt: float, level: Level) -> None:
    assert check_clock(skew, doubt).level is level


def test_strays_come_with_the_command_that_ends_them() -> None:
    assert check_strays([]).level is Level.OK
    found = check_strays(
        [
            {"pid": 7, "run": "torchrun job", "command": "x"},
            {"pid": 9, "run": "hvd-elastic digits-1", "command": "y"},
        ]
    )
    assert found.detail == (
        "2 processes of dead runs: 7 (torchrun job), 9 (hvd-elastic digits-1). End with: "
        "killclust HOSTFILE --strays; killclust HOSTFILE --run digits-1"
    )


def mesh(**slow: float) -> list[NetLink]:
    """All directions at 100 MB/s, but for ``source_target=bytes_per_s``."""
    return [
        NetLink(a, b, slow.get(f"{a}_{b}", 100e6), 1e-4) for a in NAMES for b in NAMES if a != b
    ]


def network(links: list[NetLink]) -> dict[str, str]:
    return {
        name: check.detail
        for name, checks in check_network(NAMES, links).items()
        for check in checks
        if check.level is not Level.OK
    }


def test_the_slow_link_or_the_slow_host_is_named() -> None:
    assert network(mesh()) == {}
    assert network(mesh(gpu1_gpu3=60e6)) == {}
    (found,) = network(mesh(gpu1_gpu3=10e6)).items()
    assert found[0] == "gpu1"
    usual = "elsewhere it is 800 Mbit/s, 100 µs there and back"
    assert found[1].startswith(f"to gpu3 80 Mbit/s, 100 µs there and back, {usual}")
    (found,) = network(mesh(gpu1_gpu3=10e6, gpu2_gpu3=9e6, gpu4_gpu3=11e6)).items()
    assert found[0] == "gpu3"
    assert found[1].startswith("its link carries 80 Mbit/s")
    far = [NetLink("gpu2", "gpu4", 100e6, 5e-3) if (x.source, x.target) == ("gpu2", "gpu4") else x
           for x in mesh()]  # fmt: skip
    assert list(network(far)) == ["gpu2"]


def test_noise_between_hosts_of_one_machine_is_no_bad_cable() -> None:
    rates = {("gpu1", "gpu3"): 4e8}
    local = [
        NetLink(x.source, x.target, rates.get((x.source, x.target), 2e9), 3e-5) for x in mesh()
    ]
    assert network(local) == {}
    rates = {("gpu1", "gpu3"): 1e7}
    local = [
        NetLink(x.source, x.target, rates.get((x.source, x.target), 2e9), 3e-5) for x in mesh()
    ]
    assert list(network(local)) == ["gpu1"], "a limited rate is seen all the same"


def test_who_cannot_be_reached_is_named() -> None:
    shut = [NetLink("gpu1", "gpu3", refused="10.0.0.3: timed out")]
    (found,) = network([*mesh(), *shut]).items()
    assert found[0] == "gpu1"
    assert found[1].startswith("cannot connect to gpu3 (10.0.0.3: timed out)")
    shut = [
        NetLink(name, "gpu3", refused="10.0.0.3: timed out") for name in NAMES if name != "gpu3"
    ]
    (found,) = network(shut).items()
    assert found[0] == "gpu3"
    assert found[1].startswith("nobody can connect to it (10.0.0.3: timed out)")


@pytest.mark.parametrize("number", range(1, 9))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(number: int) -> None:
    names = [f"n{index}" for index in range(number)]
    rounds = all_pairs_in_rounds(names)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == number * (number - 1) // 2
    for pairs in rounds:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))


def test_of_two_directions_the_slower_is_the_odd_one() -> None:
    links = [NetLink("a", "b", 10.0, 1e-4), NetLink("b", "a", 95.0, 1e-4)]
    assert slow_links(links) == links[:1]
