"""What another leader makes of what the hosts of a run still hold."""

from __future__ import annotations

from hvd_elastic.control.events import HostSlots
from hvd_elastic.launch.adoption import Adoption

HELD = {"generation": 1, "members": [], "workers": []}


def test_who_gave_notice_and_holds_nothing_has_been_away_and_is_back() -> None:
    adoption = Adoption(["a", "b", "c"], ["a", "b", "c"], deadline=0.0)
    adoption.draining, adoption.gave_notice = ("a", "b", "c"), frozenset({"a", "b"})
    adoption.answered("a", HELD)  # it still has workers, and goes soon
    adoption.answered("b", None)
    adoption.answered("c", None)
    assert adoption.came_back == ("b",)
    event = adoption.event(tuple(HostSlots(host, 1) for host in "abc"))
    assert event.draining == ("a", "c"), "c was drained by the user, who has not given it back"
