"""What is said of ranks that wait for their data, on windows with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.policy.autoscale import decide
from hvd_elastic.policy.evidence import Evidence
from hvd_elastic.policy.input import (
    InputSupply,
    InputWatch,
    Reading,
    choose_readers,
    find_input_bound,
)
from hvd_elastic.policy.objective import Parameters
from hvd_elastic.policy.scoring import score_allocations
from hvd_elastic.policy.snapshot import Allocation, HostOffer
from hvd_elastic.run_events import Input
from tests.unit.policy.snapshots import snapshot, well_known
from tests.unit.records.made_events import noted

FOUR_CORES = {"a": ("a", 4), "b": ("b", 4)}


def reading(
    wait_s: float,
    cpu_s: float | None,
    processes: int | None,
    *,
    starved_s: float = 10.0,
    delay_s: float = 0.0,
) -> Reading:
    return Reading(10.0, wait_s, starved_s, cpu_s, delay_s, examples=1000, processes=processes)


def helped(cpu_s: float, *, helped_s: float, link_s: float) -> Reading:
    """Two processes of input hosts read, and the rank waits for half of the time."""
    return Reading(
        10.0, 5.0, 10.0, cpu_s, 0.0, 1000, 0, helpers=2, helped_s=helped_s, link_s=link_s
    )


def test_ranks_that_do_not_wait_are_not_bound_by_input() -> None:
    found = find_input_bound([reading(0.2, 8.0, 2)] * 2, ["a", "b"], FOUR_CORES)
    assert (found.bound, found.more_cores) == ("nothing", None)
    assert "no bottleneck" in found.reason


def test_the_training_process_that_decodes_itself_needs_processes() -> None:
    """Half of the time it decodes: one core that only decodes would be as fast as the rest."""
    found = find_input_bound([reading(5.0, 5.0, 0)], ["a"], FOUR_CORES)
    assert found.bound == "cores"
    assert found.more_cores == pytest.approx(1.0)
    assert "num_workers=1" in found.reason
    assert "--input-hosts" not in found.reason


def test_decoding_that_needs_more_cores_than_the_host_has_needs_input_hosts() -> None:
    """Four processes use all cores, and the rank waits for three quarters of the time."""
    found = find_input_bound([reading(7.5, 36.0, 4)], ["a"], FOUR_CORES)
    assert found.bound == "cores"
    # Those that read without a wait, and one for training.
    assert found.more_cores == pytest.approx(3.6 / 0.25 + 1 - 4)
    assert "--input-hosts" in found.reason
    assert "75 %" in found.reason


def test_reading_a_little_beside_training_on_the_only_core_needs_a_part_of_another() -> None:
    a_little = reading(1.0, 1.0, 1, starved_s=2.0, delay_s=0.5)
    found = find_input_bound([a_little], ["a"], {"a": ("a", 1)})
    assert found.more_cores == pytest.approx(0.1 / 0.9)
    assert "0.1 more core of decoding would end it: --input-hosts" in found.reason
    # Where training does not use the core, as on a GPU, it is left to the readers.
    found = find_input_bound([reading(5.0, 10.0, 1)], ["a"], {"a": ("a", 1)})
    assert found.more_cores == pytest.approx(1.0)


def test_more_processes_are_advised_where_cores_are_idle() -> None:
    found = find_input_bound([reading(5.0, 7.0, 1)], ["a"], {"a": ("a", 16)})
    assert found.bound == "cores"
    assert "num_workers=2" in found.reason


@pytest.mark.parametrize(("cpu_s", "processes"), [(0.6, 0), (0.6, 4), (0.0, 4)])
def test_processes_that_wait_for_storage_are_not_helped_by_cores(
    cpu_s: float, processes: int
) -> None:
    found = find_input_bound([reading(6.0, cpu_s, processes)], ["a"], FOUR_CORES)
    assert (found.bound, found.more_cores) == ("storage", None)
    assert "more cores do not shorten" in found.reason
    assert "--input-hosts" not in found.reason


@pytest.mark.parametrize("cpu_s", [3.0, 9.0])
def test_readers_whose_cores_are_used_by_others_compute(cpu_s: float) -> None:
    """On a busy machine a reader has a core for a part of the time, and is ready for the rest."""
    busy = reading(7.0, cpu_s, 1, delay_s=9.5 - cpu_s)
    found = find_input_bound([busy], ["a"], FOUR_CORES)
    assert found.bound == "cores"
    assert ("(and waits 6.5 ms for it)" in found.reason) == (cpu_s == 3.0)


def test_readers_that_wait_for_a_core_now_and_then_still_wait_for_storage() -> None:
    found = find_input_bound([reading(6.0, 0.5, 1, delay_s=3.0)], ["a"], FOUR_CORES)
    assert found.bound == "storage"


def test_readers_that_are_idle_between_bursts_compute() -> None:
    """One step in five waits, and the reader has enough ahead before the others."""
    found = find_input_bound([reading(1.0, 2.5, 1, starved_s=2.5)], ["a"], FOUR_CORES)
    assert found.bound == "cores"


def test_input_hosts_that_are_busy_need_further_ones() -> None:
    """Two of their cores are busy all the time, and the rank waits for half of it."""
    found = find_input_bound([helped(20.0, helped_s=20.0, link_s=0.0)], ["a"], FOUR_CORES)
    assert (found.bound, found.helpers) == ("cores", 2)
    assert found.more_cores == pytest.approx(2.0)
    assert "further --input-hosts" in found.reason


def test_input_hosts_that_are_idle_wait_for_the_link() -> None:
    found = find_input_bound([helped(2.0, helped_s=2.0, link_s=18.0)], ["a"], FOUR_CORES)
    assert (found.bound, found.more_cores) == ("link", None)
    assert "the link to them is the limit" in found.reason
    assert found.reason.endswith("read more on this host: num_workers=1")


def test_input_hosts_that_are_busy_and_do_not_compute_wait_for_their_storage() -> None:
    found = find_input_bound([helped(2.0, helped_s=19.0, link_s=1.0)], ["a"], FOUR_CORES)
    assert (found.bound, found.more_cores) == ("storage", None)


def test_an_unknown_processor_time_leaves_the_cores_open() -> None:
    found = find_input_bound([reading(6.0, None, None)], ["a"], FOUR_CORES)
    assert (found.bound, found.more_cores, found.core_s) == ("unknown", None, None)


def test_the_rank_that_waits_most_decides_and_all_are_counted() -> None:
    slow, fast = reading(5.0, 5.0, 0), reading(0.0, 1.0, 0)
    found = find_input_bound([fast, slow], ["a", "b"], FOUR_CORES)
    assert found.share == 0.5
    assert found.shares == [0.0, 0.5]


@pytest.mark.parametrize(
    ("shares", "bounds"),
    [
        ((0.5, 0.52, 0.0), ["cores", None, "nothing"]),
        ((0.052, 0.048, 0.055, 0.03, 0.12), ["cores", None, None, None, "cores"]),
        ((0.048, 0.052, 0.045, 0.11), ["nothing", None, None, "cores"]),
    ],
)
def test_a_watch_tells_once_until_it_moves(
    shares: tuple[float, ...], bounds: list[str | None]
) -> None:
    watch = InputWatch()
    watch.machines |= FOUR_CORES
    members = [("w", "a")]
    watch.store_reading("w", Reading(examples=1, cpu_s=0.0, processes=0))
    assert watch.next_finding(members) is None
    told, total = [], 0.0
    for window, share in enumerate(shares, 1):
        total += 10 * share
        watch.store_reading("w", Reading(10.0 * window, total, total, total, 0.0, 100 * window, 0))
        found = watch.next_finding(members)
        told.append(None if found is None else found.bound)
    assert told == bounds


def test_a_watch_waits_for_all_ranks() -> None:
    watch = InputWatch()
    watch.store_reading("v", Reading(examples=1, cpu_s=0.0, processes=0))
    watch.store_reading("v", Reading(10.0, 5.0, 10.0, 5.0, 0.0, 100, 0))
    assert watch.next_finding([("v", "a"), ("w", "b")]) is None


def test_the_cores_of_a_machine_bound_what_its_ranks_read() -> None:
    supply = InputSupply(0.01, (("a", "m", 4), ("b", "m", 4), ("c", "n", 8)))
    assert supply.most([("c", 2)]) == pytest.approx(800)
    assert supply.most([("a", 1), ("b", 1)]) == pytest.approx(400)  # parts of one machine
    assert supply.most([("a", 1), ("c", 3)]) == pytest.approx(8 / 3 * 4 / 0.01)
    assert supply.most([("unknown", 2)]) == math.inf


def test_no_slots_are_added_that_would_starve() -> None:
    """Without the bound, four slots of one host would be taken."""
    hosts = (HostOffer("n0", 4),)
    model = well_known(0.001, 0.01, 0.001, 64)
    free = snapshot(model, {"n0": 1}, hosts=hosts)
    at_once = Parameters(confirmations=1)
    assert decide(free, 100.0, None, at_once).target.slots == 4
    # One rank reads as fast as it trains, about 98 examples/s, and the host reads no more.
    supply = InputSupply(0.04, (("n0", "n0", 4),))
    bound = snapshot(model, {"n0": 1}, hosts=hosts, supply=supply)
    found = decide(bound, 100.0, None, at_once)
    assert (found.action, found.target.slots) == ("stay", 1)
    assert "would wait for data" in found.reason
    assert "100 examples/s at most" in found.reason


def test_slots_on_hosts_with_cores_of_their_own_are_added() -> None:
    hosts = (HostOffer("n0", 1), HostOffer("n1", 1))
    supply = InputSupply(0.04, (("n0", "n0", 4), ("n1", "n1", 4)))
    model = well_known(0.001, 0.01, 0.001, 64)
    found = decide(
        snapshot(model, {"n0": 1}, hosts=hosts, supply=supply),
        100.0,
        None,
        Parameters(confirmations=1),
    )
    assert found.target.slots == 2


def test_starved_throughput_is_what_the_cores_read() -> None:
    hosts = (HostOffer("n0", 4),)
    seen = snapshot(
        well_known(0.001, 0.01, 0.001, 64),
        {"n0": 1},
        hosts=hosts,
        supply=InputSupply(0.04, (("n0", "n0", 4),)),
    )
    scores = score_allocations(seen, [Allocation.of({"n0": n}) for n in (1, 4)])
    assert scores.goodput[1] == pytest.approx(100.0, rel=0.01)
    assert np.all(scores.starved[1] > 0.6)


def test_evidence_takes_the_bound_from_the_events_of_a_run() -> None:
    evidence = Evidence()
    noted(evidence, "agent_started", {"host": "a", "machine": "m", "cpus": 4}, 0.0)
    assert evidence.supply is None
    noted(evidence, "input", {"bound": "cores", "core_s": 0.01}, 1.0)
    assert evidence.supply == InputSupply(0.01, (("a", "m", 4),))
    noted(evidence, "input", {"bound": "nothing", "core_s": 0.01}, 2.0)
    assert evidence.supply is None
    noted(evidence, "input", {"bound": "cores", "core_s": 0.01, "helpers": 4}, 4.0)
    assert evidence.supply is None  # input hosts have cores of their own


WAITS_HALF = Input(0.5, [0.5], "cores", 6.0, 0.01, 0, "")


def reader(name: str, price: float, cpus: int | None = 4) -> Host:
    return Host(name, slots=0, cpus=cpus, price=price, labels=("input",))


def test_the_cheapest_readers_that_end_the_wait_are_added() -> None:
    offered = [reader("dear", 2.0), reader("a", 0.5), reader("b", 0.2), reader("c", 0.4)]
    choice = choose_readers(WAITS_HALF, offered, price=3.0)
    assert choice.hosts == ("b", "c")  # 8 of 6 cores that are missing
    # (3 + 0.6) / 3 of the price for twice the examples
    assert "hosts b, c have 8 for 0.6 per hour: an example costs 40 % less" in choice.reason


def test_a_reader_that_costs_more_than_it_brings_is_not_added() -> None:
    choice = choose_readers(WAITS_HALF, [reader("dear", 9.0, 6)], price=3.0)
    assert choice.hosts == ()
    assert choice.reason.endswith(
        "an example costs 100 % more"
    )  # four times the price, twice as fast


def test_readers_are_added_up_to_where_an_example_costs_least() -> None:
    offered = [reader("first", 0.3, 3), reader("second", 5.0, 3)]
    assert choose_readers(WAITS_HALF, offered, price=3.0).hosts == ("first",)


@pytest.mark.parametrize("price", [None, 0.0])
def test_without_prices_of_those_that_train_the_wait_is_ended(price: float | None) -> None:
    offered = [reader("a", 1.0), reader("b", 2.0), reader("c", 3.0)]
    choice = choose_readers(WAITS_HALF, offered, price)
    assert choice.hosts == ("a", "b")
    assert "an example" not in choice.reason


def test_a_reader_of_unknown_cores_counts_as_one() -> None:
    choice = choose_readers(WAITS_HALF, [reader("a", 0.1, None)], price=3.0)
    assert choice.hosts == ("a",)
    assert "host a has 1 for 0.1 per hour" in choice.reason


def test_a_watch_that_begins_anew_looks_at_a_whole_window_again() -> None:
    watch = InputWatch()
    for loop_s in (0.0, 6.0):
        watch.store_reading(
            "w", Reading(loop_s, loop_s / 2, loop_s, loop_s / 2, 0.0, int(100 * loop_s), 0)
        )
    assert watch.next_finding([("w", "a")])
    watch.begin_anew()
    assert watch.next_finding([("w", "a")]) is None
    for loop_s in (7.0, 13.0):
        watch.store_reading(
            "w", Reading(loop_s, loop_s / 2, loop_s, loop_s / 2, 0.0, int(100 * loop_s), 0)
        )
    assert watch.next_finding([("w", "a")])
