"""What a leader knows, what it does not know yet, and what the next one is told."""

from __future__ import annotations

from typing import Any

from hvd_elastic.agent.unacknowledged import Ledger
from hvd_elastic.wire.framing import Message


def said(ledger: Ledger, kind: str, worker: str = "w", **fields: Any) -> int:
    message = ledger.number({"ev": "worker", "worker": worker, "message": {"kind": kind, **fields}})
    number: int = message["seq"]
    return number


def facts(ledger: Ledger) -> Message:
    (found,) = ledger.snapshot()["workers"]
    return dict(found)


def kinds(ledger: Ledger) -> list[str]:
    return [message["message"]["kind"] for message in ledger.unacknowledged()]


def trained() -> Ledger:
    """A worker that is known to have joined generation 1."""
    ledger = Ledger()
    ledger.started("w", 2)
    said(ledger, "ready", warm_s=1.0)
    ledger.announced(1, [["w", "host", 2]], ["w"])
    ledger.acknowledged(said(ledger, "joined", generation=1))
    return ledger


def test_a_worker_is_known_from_its_start() -> None:
    ledger = Ledger()
    ledger.started("w", 2)
    said(ledger, "ready", warm_s=1.0)
    assert (facts(ledger)["slot"], facts(ledger)["ready"]) == (2, False)
    assert kinds(ledger) == ["ready"]


def test_what_is_acknowledged_is_known_and_not_told_again() -> None:
    ledger = trained()
    assert (facts(ledger)["ready"], facts(ledger)["joined"]) == (True, 1)
    assert facts(ledger)["holds_state"]
    assert ledger.unacknowledged() == []


def test_what_is_not_acknowledged_is_told_again_in_order() -> None:
    ledger = trained()
    first = said(ledger, "metrics", step=1)
    said(ledger, "used", step=1)
    said(ledger, "broken", generation=1, step=4)
    ledger.acknowledged(first)
    assert kinds(ledger) == ["used", "broken"]
    assert not facts(ledger)["waiting"]


def test_an_announcement_proves_that_its_leader_had_heard_what_led_to_it() -> None:
    ledger = trained()
    said(ledger, "metrics", step=1)
    said(ledger, "broken", generation=1, step=4)
    ledger.announced(2, [["w", "host", 2]], ["w"])
    assert kinds(ledger) == ["metrics"], "told again, it would be taken for news of generation 2"
    assert (facts(ledger)["generation"], facts(ledger)["waiting"]) == (2, False)


def test_a_worker_that_broke_off_waits_with_its_step() -> None:
    ledger = trained()
    ledger.acknowledged(said(ledger, "broken", generation=1, step=4, state=1))
    known = facts(ledger)
    assert (known["waiting"], known["step"], known["state"]) == (True, 4, 1)
    assert facts(ledger)["holds_state"]
    ledger.acknowledged(said(ledger, "broken", generation=1, step=-1))
    assert not facts(ledger)["holds_state"]


def test_orders_are_known_at_once() -> None:
    ledger = trained()
    ledger.told("w", "checkpoint")
    assert not facts(ledger)["leaving"]
    ledger.told("w", "leave")
    assert facts(ledger)["leaving"]
    ledger.killed("w", "it gave no answer")
    assert facts(ledger)["killed"] == "it gave no answer"


def test_a_worker_is_known_until_its_end_is_acknowledged() -> None:
    ledger = trained()
    said(ledger, "finished")
    assert ledger.any_finished
    end = ledger.number({"ev": "worker_exited", "worker": "w", "code": 0, "signal": None})
    assert facts(ledger)["worker"] == "w"
    ledger.acknowledged(end["seq"])
    assert ledger.snapshot()["workers"] == []


def test_of_too_much_output_the_newest_is_lost_and_nothing_else() -> None:
    ledger = trained()
    for _ in range(40):
        ledger.number({"ev": "log", "worker": "w", "data": "x" * (1 << 20)})
    said(ledger, "metrics", step=1)
    kept = ledger.unacknowledged()
    assert sum(len(message.get("data", "")) for message in kept) <= 32 << 20
    assert kept[-1]["message"]["kind"] == "metrics"
    ledger.acknowledged(kept[-1]["seq"])
    ledger.number({"ev": "log", "worker": "w", "data": "x"})
    assert len(ledger.unacknowledged()) == 1


def test_what_was_read_outlives_the_agent() -> None:
    ledger = trained()
    said(ledger, "metrics", step=1)
    said(ledger, "used", step=1)
    ledger.number({"ev": "past", "message": {"kind": "used", "step": 0}})
    assert [m["step"] for m in ledger.unacknowledged_readings()] == [1, 0]
