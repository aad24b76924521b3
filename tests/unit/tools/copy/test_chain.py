"""Who feeds whom, and what is done about silence, stalls and slowness; no clock, no network."""

from __future__ import annotations

import pytest

from hvd_elastic.tools.copy.chain import Chain, Verdict, Why

MB = 1_000_000


def chain_of(*names: str) -> Chain:
    chain = Chain("leader")
    for name in names:
        chain.add_node(name, 0.0)
    return chain


def beat(chain: Chain, now: float, received: dict[str, int], sending: set[str]) -> None:
    """Everybody tells how far it is; the feeders of ``sending`` are held up by their links."""
    for name, count in received.items():
        chain.hear(name, now, count, 100 * MB - count)
        chain.hear_feeding(name, now, count, name in sending)


def test_each_feeds_the_next_and_the_last_nobody():
    assert chain_of("a", "b", "c").links() == {"a": "leader", "b": "a", "c": "b"}


def test_who_needs_nothing_is_not_fed_but_feeds():
    chain = chain_of("a", "b")
    chain.hear("a", 0.0, 0, 0)
    assert chain.links() == {"b": "a"}


def test_shares_come_from_the_source():
    chain = Chain("leader", spread=True)
    chain.add_node("a", 0.0)
    chain.add_node("b", 0.0)
    assert chain.links() == {"a": "leader", "b": "leader"}


def test_silence_is_found_even_where_everything_flows():
    chain = chain_of("a", "b", "c")
    for tick in range(16):
        beat(chain, tick * 0.25, {"a": tick * MB, "c": tick * MB}, set())
    assert chain.verdicts(3.75) == [Verdict("b", Why.SILENT)]
    chain.remove("b")
    assert chain.links() == {"a": "leader", "c": "a"}
    assert chain.verdicts(3.75) == []


def test_a_leader_that_slept_blames_nobody():
    chain = chain_of("a")
    beat(chain, 0.0, {"a": 0}, {"a"})
    chain.discount(100.0)
    assert chain.verdicts(101.0) == []


def test_a_stalled_node_goes_to_the_end_then_to_the_source_then_out():
    chain = chain_of("a", "b", "c")

    def stall(since: float) -> list[Verdict]:
        for tick in range(16):
            now = since + tick * 0.25
            # a has all, its link to b takes nothing more; c waits for b, which has nothing for it.
            beat(chain, now, {"a": 50 * MB, "b": MB, "c": MB}, {"b"})
        return chain.verdicts(since + 3.75)

    assert stall(0.0) == [Verdict("b", Why.STALLED)]
    chain.move("b", Why.STALLED)
    chain.linked("b", 4.0)
    assert chain.links() == {"a": "leader", "c": "a", "b": "c"}
    assert stall(4.0) == [Verdict("b", Why.STALLED)]
    chain.move("b", Why.STALLED)
    chain.linked("b", 8.0)
    assert chain.links()["b"] == "leader"
    assert stall(8.0) == [Verdict("b", Why.HOPELESS)]
    chain.hear("b", 12.0, 2 * MB, 98 * MB)
    assert chain.blame("b") == Verdict("b", Why.STALLED), "something has arrived since"


@pytest.mark.parametrize("followers", [("c",), ()])
def test_a_slow_node_goes_to_the_end_once_if_it_holds_anybody_up(followers: tuple[str, ...]):
    chain = chain_of("a", "b", *followers)
    for tick in range(16):
        slow = dict.fromkeys(("b", *followers), tick * MB // 5)
        beat(chain, tick * 0.25, {"a": tick * MB, **slow}, {"a", "b"})
    if not followers:
        assert chain.verdicts(3.75) == []
        return
    assert chain.verdicts(3.75) == [Verdict("b", Why.SLOW)]
    chain.move("b", Why.SLOW)
    assert chain.order == ["a", "c", "b"]
    assert chain.verdicts(3.75) == []
    # It is no newcomer's feeder.
    chain.add_node("late", 3.75)
    assert chain.links()["late"] == "c"


def test_slow_nodes_are_all_fed_by_the_last_of_the_others():
    chain = chain_of("a", "b", "c", "d", "e")
    for name in ("b", "d"):
        chain.move(name, Why.SLOW)
    assert chain.links() == {"a": "leader", "c": "a", "e": "c", "b": "e", "d": "e"}
    for name in ("a", "c", "e"):
        chain.move(name, Why.SLOW)
    assert set(chain.links().values()) == {"leader"}


def test_who_came_after_a_slow_node_is_not_slow_itself():
    chain = chain_of("a", "b", "c", "d")
    slowly = {"b", "c", "d"}
    received = dict.fromkeys("abcd", 0)
    moved = []
    for tick in range(40):
        # What was on its way comes slowly still, with all links held up.
        for name in received:
            received[name] += (200 if name in slowly else 1000) * 1000
        beat(chain, tick * 0.25, received, set(received))
        for verdict in chain.verdicts(tick * 0.25):
            moved.append(verdict)
            chain.move(verdict.name, verdict.why)
            chain.linked("c", tick * 0.25)
            chain.linked("b", tick * 0.25)
        if tick == 10:
            slowly = {"b"}
    assert moved == [Verdict("b", Why.SLOW)]


def test_one_speed_for_all_is_nobodys_fault():
    chain = chain_of("a", "b", "c")
    for tick in range(16):
        beat(chain, tick * 0.25, dict.fromkeys("abc", tick * MB), {"a", "b", "c"})
    assert chain.verdicts(3.75) == []


def stall_unsent(chain: Chain, name: str) -> None:
    chain.linked(name, 0.0)
    chain.hear_feeding(name, 0.0, -1, True)
    chain.move(name, Why.STALLED)


def test_who_cannot_be_reached_by_one_is_fed_by_another():
    chain = chain_of("a", "b", "c")
    stall_unsent(chain, "c")
    assert chain.links() == {"a": "leader", "b": "a", "c": "a"}
    assert chain.blocked("c") == ["b"]
    # By two: it is apart from all, and feeds nobody.
    stall_unsent(chain, "c")
    assert chain.links() == {"a": "leader", "b": "a", "c": "leader"}
    chain.add_node("d", 0.0)
    assert chain.links()["d"] == "b"
    chain.remove("c")
    chain.add_node("c", 0.0)
    assert chain.links()["c"] == "d"


def test_who_reaches_nobody_feeds_nobody():
    chain = chain_of("a", "b", "c", "d")
    stall_unsent(chain, "b")
    assert chain.links() == {"a": "leader", "b": "leader", "c": "b", "d": "c"}
    chain.move("a", Why.SLOW)
    assert chain.order == ["b", "c", "d", "a"]
    stall_unsent(chain, "a")
    assert chain.links()["a"] == "leader"
    assert chain.links()["c"] == "b"


def test_whom_the_leader_cannot_reach_is_fed_by_the_last():
    chain = chain_of("a", "b")
    stall_unsent(chain, "a")
    assert chain.links() == {"b": "leader", "a": "b"}
    assert chain.blocked("a") == ["leader"]


def test_without_a_source_the_last_feeds_the_first():
    chain = Chain(None)
    for name in "abc":
        chain.add_node(name, 0.0)
    assert chain.links() == {"a": "c", "b": "a", "c": "b"}
    chain.move("a", Why.STALLED)
    assert chain.links() == {"b": "c", "a": "b", "c": "a"}
    chain.move("c", Why.STALLED)
    assert chain.links() == {"b": "a", "c": "b", "a": "c"}
    chain.hear("b", 0.0, 0, 0)
    chain.remove("a")
    assert chain.links() == {"c": "b"}
    chain.remove("b")
    assert chain.links() == {}
