"""Figures of the scaling benchmark, made of known step times."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hvd_elastic.bench.scaling import (
    Cost,
    Scaling,
    Settings,
    cheapest_by,
    check_prices,
    compare,
    costs,
    knee,
    scaling_of,
)
from hvd_elastic.cli.planning.scaling_tables import notes_of, tables_of
from hvd_elastic.errors import UsageError
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.policy.evidence import CoreSharing

HOSTS = [Host("a", slots=4, price=2.0), Host("b", slots=4, price=2.0)]


def figures(step_s: float, exposed_s: float, compute_s: float | None = 0.1) -> dict[str, Any]:
    told = {"step_s": step_s, "half_s": 0.001, "exposed_s": exposed_s, "parameters": 1e6}
    return told if compute_s is None else {**told, "compute_s": compute_s}


def scaling(*slots: int, slower: float = 1.0) -> Scaling:
    """Steps of 0.1 s, and 5 ms of communication for each further rank."""
    found = {}
    for number in slots:
        exposed_s = 0.005 * (number - 1)
        found[number] = (1 if number <= 4 else 2, figures(slower * (0.1 + exposed_s), exposed_s))
    return scaling_of(Settings(batch_size=50), HOSTS, found)


def test_throughput_efficiency_and_parts() -> None:
    found = scaling(1, 2, 4)
    last = found.sizes[-1]
    assert last.throughput == pytest.approx(200 / 0.115)
    assert last.low < last.throughput < last.high
    assert last.efficiency == pytest.approx(0.1 / 0.115)
    assert (last.exposed_s, last.rest_s) == pytest.approx((0.015, 0.0))
    assert "13 % for waiting for gradients" in found.words
    assert "slower passes" not in found.words


def test_communication_is_what_a_step_takes_longer_where_it_is_not_told_apart() -> None:
    told = {n: (1, figures(0.1 + 0.01 * (n - 1), 0.0, None)) for n in (1, 2)}
    for _, each in told.values():
        del each["exposed_s"]
    found = scaling_of(Settings("tensorflow"), HOSTS, told)
    assert found.sizes[1].exposed_s == pytest.approx(0.01)
    assert found.sizes[1].rest_s == pytest.approx(0.0)


def test_other_sizes_are_predicted() -> None:
    found = scaling(1, 2, 4, 5)
    assert [each.slots for each in found.predicted] == [8]
    (eight,) = found.predicted
    assert eight.hosts == 2
    assert eight.low < 400 / 0.135 < eight.high
    assert found.check is not None
    assert found.check[0] == 5


def test_cost_knee_and_deadline() -> None:
    found = costs(scaling(1, 2, 4, 8), 1_000_000, 10)
    assert [each.slots for each in found] == [1, 2, 4, 8]
    # 10 million examples at 50 in 0.1 s, one host of 2 per hour
    assert found[0].hours == pytest.approx(10e6 / 500 / 3600)
    assert found[0].cost == pytest.approx(2 * found[0].hours)
    assert knee(found).slots == 8
    best = cheapest_by(found, found[2].hours)
    assert best is not None
    assert best.slots == 4  # the second host is dearer than it is faster
    assert cheapest_by(found, 0.01) is None


def test_speed_that_does_not_pay_ends_at_the_knee() -> None:
    slow = {n: (1 if n <= 4 else 2, figures(0.1 if n <= 4 else 0.19, 0.0)) for n in (1, 4, 8)}
    assert knee(costs(scaling_of(Settings(), HOSTS, slow), 1000, 1)).slots == 4


def test_hosts_that_cost_nothing_are_no_dearer() -> None:
    free = [Cost(1, True, 0.0, 10.0, 0.0), Cost(2, True, 0.0, 6.0, 0.0)]
    assert knee([*free, Cost(4, True, 3.0, 4.0, 12.0)]).slots == 2
    assert knee([free[0], Cost(2, True, 0.0, 12.0, 0.0)]).slots == 1


def test_prices_are_for_all_hosts_or_none() -> None:
    check_prices(HOSTS)
    check_prices([Host("a"), Host("b")])
    with pytest.raises(UsageError, match="price= is missing for c"):
        check_prices([*HOSTS, Host("c")])
    without = [dataclasses.replace(host, price=None) for host in HOSTS]
    assert costs(scaling_of(Settings(), without, {1: (1, figures(0.1, 0.0))}), 10, 1) == []


def test_differences_beyond_the_noise_are_told() -> None:
    before, slower = scaling(1, 2).as_json(), scaling(2, 4, slower=1.2).as_json()
    (same, _) = compare(before, before)
    assert not same.differs
    (found,) = compare(before, slower)
    assert found.slots == 2
    assert found.ratio == pytest.approx(1 / 1.2)
    assert found.differs


def test_results_of_different_settings_are_not_compared() -> None:
    other = scaling_of(Settings(batch_size=64), HOSTS, {1: (1, figures(0.1, 0.0))}).as_json()
    with pytest.raises(UsageError, match="batch_size is 50 in one and 64 in the other"):
        compare(scaling(1).as_json(), other)
    with pytest.raises(UsageError, match="no number of slots is in both"):
        compare(scaling(1).as_json(), scaling(2).as_json())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(framework="jax"), "torch or tensorflow"),
        (Settings(precision="int8"), "fp32, fp16, bf16"),
        (Settings(model="vgg"), "resnet50 or gpt2"),
    ],
)
def test_settings_that_are_not_valid(settings: Settings, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settings.check()


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_framework_that_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"{framework} is not installed here"):
        Settings(framework=framework).check()


def test_a_size_with_more_ranks_on_a_core_than_were_measured_is_not_predicted() -> None:
    """One machine of two cores that plays several hosts: 1, 2 and 4 ranks are equally fast."""
    hosts = [Host(name, slots=4) for name in "abc"]
    cores = CoreSharing()
    for host in hosts:
        cores.add_host(host.name, "the machine", 2)
    found = {n: (1, figures(0.1 * max(1, n / 2), 0.0)) for n in (1, 2, 4)}
    result = scaling_of(Settings(batch_size=50), hosts, found, cores)
    assert result.predicted == ()
    why = "{} ranks would share 2 cores of one machine, and at most 4 ranks on 2 cores were timed"
    assert result.unknown == ((8, why.format(8)), (12, why.format(12)))
    (_, rows) = tables_of(result, 1000, 1)[1]
    assert [row[2] for row in rows[1:]] == ["not known", "not known"]
    assert any(why.format(8) in note for note in notes_of(result, 1000, 1, None))
