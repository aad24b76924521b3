"""Slots move between jobs without two processes in one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.jobs.slot_plan import Claim, grant_slots

HOSTS = {"a": 2, "b": 2, "c": 3}


def test_slot_is_given_only_when_the_process_in_it_is_gone():
    grows = Claim({"a": 2}, {"a": 1}, {"a": 1})
    leaving = Claim({"b": 1}, {"b": 1}, {"a": 1, "b": 1})
    assert grant_slots({"1": grows, "2": leaving}, HOSTS)["1"] == {"a": 1}
    left = Claim({"b": 1}, {"b": 1}, {"b": 1})
    assert grant_slots({"1": grows, "2": left}, HOSTS)["1"] == {"a": 2}


def test_job_that_moves_keeps_its_minimum_until_there_is_room():
    moves = Claim({"b": 2}, {"a": 2}, {"a": 2}, min_slots=1)
    full = Claim({"b": 2}, {"b": 2}, {"b": 2})
    assert grant_slots({"1": moves, "2": full}, HOSTS)["1"] == {"a": 1}
    assert grant_slots({"1": moves}, HOSTS)["1"] == {"b": 2}
    assert grant_slots({"1": Claim({"b": 1}, {"a": 1}, {"a": 1})}, HOSTS)["1"] == {"b": 1}


def test_a_job_that_moves_never_has_more_slots_than_it_is_to_have():
    moves = Claim({"b": 2}, {"a": 2}, {"a": 2}, min_slots=2)
    half = Claim({"b": 1}, {"b": 1}, {"b": 1})
    assert grant_slots({"1": moves, "2": half}, {"a": 2, "b": 2})["1"] == {"a": 1, "b": 1}
    grows = Claim({"b": 3}, {"a": 2}, {"a": 2}, min_slots=2)
    assert grant_slots({"1": grows, "2": half}, {"a": 2, "b": 2})["1"] == {"a": 2, "b": 1}


def test_slots_of_a_host_that_is_gone_are_lost():
    claim = Claim({"a": 1}, {"a": 1, "gone": 2}, {"a": 1, "gone": 2})
    assert grant_slots({"1": claim}, HOSTS)["1"] == {"a": 1}


def test_a_job_gets_back_the_slot_that_its_own_process_is_leaving():
    claim = Claim({"a": 2}, {"a": 1}, {"a": 2})
    assert grant_slots({"1": claim}, HOSTS)["1"] == {"a": 2}
    grows = Claim({"a": 2}, {}, {})
    assert grant_slots({"1": claim, "2": grows}, {"a": 4})["2"] == {"a": 2}, "not counted twice"


slots = st.dictionaries(st.sampled_from(sorted(HOSTS)), st.integers(1, 2), max_size=3)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, dict[str, int]]]:
    """Decisions of a scheduler: what each of three jobs is to have, which fits the hosts."""
    found = []
    for _ in range(3):
        free = dict(HOSTS)
        for job in "123":
            wanted = {h: min(n, free[h]) for h, n in draw(slots).items() if free[h]}
            for host, number in wanted.items():
                free[host] -= number
            found.append((job, wanted))
    return found


@given(histories())
def test_no_slot_is_ever_used_twice_and_every_decision_is_reached(history):
    held: dict[str, dict[str, int]] = {job: {} for job in "123"}
    occupied: dict[str, dict[str, int]] = {job: {} for job in "123"}
    for decision in range(0, len(history), 3):
        wanted = dict(history[decision : decision + 3])
        for _ in range(12):
            claims = {job: Claim(wanted[job], held[job], occupied[job], 1) for job in "123"}
            held = grant_slots(claims, HOSTS)
            # Processes start where slots are held, and end a moment after they are taken away.
            for host, number in HOSTS.items():
                used = sum(max(held[job].get(host, 0), occupied[job].get(host, 0)) for job in "123")
                assert used <= number
            occupied = held
        swaps = any(wanted[job] and not (held[job].items() & wanted[job].items()) for job in "123")
        assert held == {job: wanted[job] for job in "123"} or swaps


def test_a_job_that_ends_on_a_host_that_was_taken_out_keeps_nothing_there() -> None:
    ending = Claim({"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1})
    assert grant_slots({"one": ending}, {"b": 1}) == {"one": {"b": 1}}
    assert grant_slots({"one": ending}, {}) == {"one": {}}
