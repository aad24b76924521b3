"""What a leader knows, what it does not know yet, and what the next one is told."""

from __future__ import annotations

from typing import Any

from hvd_elastic.agent.leader_link import UnacknowledgedLog
from hvd_elastic.control.commands import Announce, Member
from hvd_elastic.control.events import FoundWorker
from hvd_elastic.control.progress import Position
from hvd_elastic.run_events import BatchLimits, BatchPlan, Metrics, Shares
from hvd_elastic.wire import messages as msg

READY = msg.Ready(warm_s=1.0)
FINISHED = msg.Finished(Position(1, 0, 0, 8))


def used(step: int) -> msg.Used:
    return msg.Used(generation=1, step=step, epoch=0, position=0, indices=[step], padding=[])


def metrics() -> Metrics:
    return Metrics(1, 0, 0, 8, 1, values={"loss": 0.5})


def broken(step: int, state: int = 0) -> msg.Broken:
    return msg.Broken(generation=1, step=step, state=state, error="a test")


def said(ledger: UnacknowledgedLog, message: Any, worker: str = "w") -> int:
    return ledger.number(msg.WorkerSaid(worker, message)).seq


def facts(ledger: UnacknowledgedLog) -> FoundWorker:
    (found,) = ledger.snapshot(0).workers
    return found


def told_again(ledger: UnacknowledgedLog) -> list[type]:
    return [
        type(message.message)
        for message in ledger.unacknowledged()
        if isinstance(message, msg.WorkerSaid)
    ]


def order(generation: int) -> Announce:
    member = Member("w", "host", 2, 0, 0, 1, 0, 1)
    return Announce(generation, (member,), None, restore=False, reason="a test")


def trained() -> UnacknowledgedLog:
    """A worker that is known to have joined generation 1."""
    ledger = UnacknowledgedLog()
    ledger.started("w", "host", 2)
    said(ledger, READY)
    ledger.announced(order(1), ["w"])
    ledger.acknowledged(said(ledger, msg.Joined(generation=1, step=0)))
    return ledger


def test_a_worker_is_known_from_its_start() -> None:
    ledger = UnacknowledgedLog()
    ledger.started("w", "host", 2)
    said(ledger, READY)
    assert (facts(ledger).slot, facts(ledger).ready) == (2, False)
    assert told_again(ledger) == [msg.Ready]


def test_what_is_acknowledged_is_known_and_not_told_again() -> None:
    ledger = trained()
    assert (facts(ledger).ready, facts(ledger).joined) == (True, 1)
    assert facts(ledger).holds_state
    assert ledger.unacknowledged() == []


def test_what_is_not_acknowledged_is_told_again_in_order() -> None:
    ledger = trained()
    first = said(ledger, metrics())
    said(ledger, used(1))
    said(ledger, broken(4))
    ledger.acknowledged(first)
    assert told_again(ledger) == [msg.Used, msg.Broken]
    assert not facts(ledger).waiting


def test_an_announcement_proves_that_its_leader_had_heard_what_led_to_it() -> None:
    ledger = trained()
    said(ledger, metrics())
    said(ledger, broken(4))
    ledger.announced(order(2), ["w"])
    assert told_again(ledger) == [Metrics], "told again, it would be news of generation 2"
    assert (facts(ledger).generation, facts(ledger).waiting) == (2, False)


def test_a_worker_that_broke_off_waits_with_its_step() -> None:
    ledger = trained()
    ledger.acknowledged(said(ledger, broken(4, state=1)))
    known = facts(ledger)
    assert (known.waiting, known.step, known.state) == (True, 4, 1)
    assert facts(ledger).holds_state
    ledger.acknowledged(said(ledger, broken(-1)))
    assert not facts(ledger).holds_state


def test_orders_are_known_at_once() -> None:
    ledger = trained()
    ledger.told_to_leave("w")
    assert facts(ledger).leaving
    ledger.killed("w", "it gave no answer")
    assert facts(ledger).killed == "it gave no answer"


def test_a_worker_is_known_until_its_end_is_acknowledged() -> None:
    ledger = trained()
    said(ledger, FINISHED)
    assert ledger.any_finished
    end = ledger.number(msg.WorkerEnded("w", code=0, signal=None))
    assert facts(ledger).worker == "w"
    ledger.acknowledged(end.seq)
    assert ledger.snapshot(0).workers == ()


def test_of_too_much_output_the_newest_is_lost_and_nothing_else() -> None:
    ledger = trained()
    for _ in range(40):
        ledger.number(msg.Log("w", "x" * (1 << 20)))
    said(ledger, metrics())
    kept = ledger.unacknowledged()
    assert sum(len(m.data) for m in kept if isinstance(m, msg.Log)) <= 32 << 20
    assert told_again(ledger) == [Metrics]
    ledger.acknowledged(kept[-1].seq)
    ledger.number(msg.Log("w", "x"))
    assert len(ledger.unacknowledged()) == 1


def test_what_was_read_outlives_the_agent() -> None:
    ledger = trained()
    said(ledger, metrics())
    said(ledger, used(1))
    ledger.number(msg.PastReading(used(0)))
    assert ledger.unacknowledged_readings() == [used(1), used(0)]


def test_the_next_leader_is_told_again_what_rank_0_planned() -> None:
    limits = BatchLimits(64, 512, 1, None, 3)
    first = BatchPlan(0, 64, 32, 0, None, limits, "the initial batch size")
    grown = BatchPlan(9, 128, 32, 1, None, limits, "noise")
    shares = Shares(9, 128, [96, 32], "rank 1 is slow")
    ledger = trained()
    ledger.acknowledged(said(ledger, first))
    ledger.acknowledged(said(ledger, shares))
    said(ledger, grown)  # not acted upon yet, so the last word stays the last
    for _ in range(2):
        ledger.changed_leader()
        again = [each for each in ledger.unacknowledged() if isinstance(each, msg.WorkerSaid)]
        assert [each.message for each in again][-2:] == [grown, shares]
        ledger.acknowledged(ledger.unacknowledged()[-1].seq)
    moved = Announce(2, (Member("other", "b", 0, 0, 0, 1, 0, 1),), None, restore=False, reason="")
    ledger.announced(moved, [])
    ledger.changed_leader()
    assert ledger.unacknowledged() == [], "rank 0 is on another host, and has told it there"


def test_the_next_leader_is_told_of_the_dataset_again() -> None:
    ledger = trained()
    ledger.changed_leader()
    assert ledger.unacknowledged() == [], "there is none yet"
    ledger.acknowledged(said(ledger, msg.Dataset(n=90, dropped=0)))
    for _ in range(2):
        ledger.changed_leader()
        assert ledger.unacknowledged_readings() == [msg.Dataset(n=90, dropped=0)]
        ledger.acknowledged(ledger.unacknowledged()[-1].seq)
