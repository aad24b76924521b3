"""Machines of a cloud: written down before an order, asked pool by pool, found and ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_elastic.engines.base import WaitReport
from hvd_elastic.engines.cloud import machines as module
from hvd_elastic.engines.cloud.machines import LEFT_OUT_S, Ladder, Machines
from hvd_elastic.engines.cloud.provider import (
    CapacityError,
    CloudError,
    CredentialsError,
    Machine,
    Offer,
    Order,
    QuotaError,
    ThrottledError,
    UnsupportedError,
)
from hvd_elastic.engines.cloud.records import CloudFolder, Definition, owner
from hvd_elastic.errors import RunError
from hvd_elastic.policy.spot import MachinePlan

POOLS = (
    Offer("small", "a", spot=True, price=0.3),
    Offer("small", "b", spot=True, price=0.35),
    Offer("small", "a", price=1.0),
    Offer("small", "b", price=1.0),
)
SPOT = MachinePlan(8, 0, "")


class Cloud:
    """A provider in memory; ``hidden_s`` is how long its list does not show what was started."""

    preemption: str | None = None

    def __init__(self, hidden_s: float = 0.0) -> None:
        self.hidden_s = hidden_s
        self.machines: dict[str, Machine] = {}
        self.since: dict[str, float] = {}
        self.orders: list[Order] = []
        self.refusals: dict[str, CloudError] = {}
        self.pools: Sequence[Offer] = POOLS
        self.free: dict[Offer, float] = {}
        """How many machines pools still have; those that are not in it have any number."""
        self.before: Callable[[Order], None] = lambda _: None
        self.after: Callable[[], None] = lambda: None
        self.on_its_way: Callable[[], None] = lambda: None

    def offers(self, types: Sequence[str], zones: Sequence[str], spot: bool) -> Sequence[Offer]:
        return [offer for offer in self.pools if spot or not offer.spot]

    def start(self, order: Order) -> Sequence[Machine]:
        self.before(order)
        self.orders.append(order)
        if error := self.refusals.get(order.offer.name):
            raise error
        made = []
        self.free.setdefault(order.offer, math.inf)
        for _ in range(int(min(order.count, self.free[order.offer]))):
            name = f"m{len(self.machines)}"
            made.append(Machine(name, "running", f"10.0.1.{name[1:]}", order.offer, order.tags))
            self.machines[name] = made[-1]
            self.since[name] = time.monotonic()
        self.free[order.offer] -= len(made)
        self.after()
        if not made:
            raise CapacityError("no capacity")
        return made

    def list(self, tags: Mapping[str, str]) -> Sequence[Machine]:
        found = [
            each
            for name, each in self.machines.items()
            if tags.items() <= each.tags.items()
            and time.monotonic() >= self.since[name] + self.hidden_s
        ]
        self.on_its_way()
        return found

    def stop(self, ids: Sequence[str]) -> None:
        for each in ids:
            if each in self.machines:
                self.machines[each] = replace(self.machines[each], state="ended")

    @property
    def live(self) -> set[str]:
        return {each.id for each in self.machines.values() if each.state != "ended"}


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HVD_ELASTIC_CLOUD_SETTLE_S", "0.5")
    monkeypatch.setattr(module, "_POLL_S", 0.02)


@pytest.fixture
def folder() -> CloudFolder:
    found = CloudFolder("lab")
    deadline = time.time() + 3600
    found.write(Definition("lab", "memory", {}, ("small",), most=8, spot=True, deadline=deadline))
    return found


@pytest.fixture
def said() -> list[str]:
    return []


def machines_of(folder: CloudFolder, cloud: Cloud, said: list[str], by: str = "") -> Machines:
    return Machines(folder, cloud, said.append, by)


def change(folder: CloudFolder, **values: object) -> None:
    folder.write(replace(folder.read(), **values))  # type: ignore[arg-type]


def test_an_order_is_on_disk_with_its_token_before_the_cloud_hears_of_it(folder, said) -> None:
    cloud, found = Cloud(), []
    cloud.before = lambda order: found.append((order.token, folder.intents()))
    machines_of(folder, cloud, said, "run r1").start(1, (), SPOT)
    ((token, (intent,)),) = found
    assert (intent.token, intent.ids, intent.by) == (token, None, "run r1")
    assert cloud.orders[0].tags["token"] == token
    assert folder.intents()[0].ids == ("m0",)


@pytest.mark.parametrize(
    ("login", "config", "user"),
    [("eve", "Host *\n  User ann\n", "eve"), ("", "Host *\n  User ann\n", "ann"), ("", "", "bob")],
)
def test_the_lease_of_a_machine_is_of_the_user_that_ssh_logs_in_as(
    folder, said, tmp_path, monkeypatch, login: str, config: str, user: str
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "bob")
    path = tmp_path / "config"
    path.write_text(config)
    path.chmod(0o600)
    change(folder, login=login, ssh_config=str(path))
    cloud = Cloud()
    machines_of(folder, cloud, said).start(1, (), SPOT)
    assert f" $max {user} " in cloud.orders[0].user_data


def test_no_machine_is_asked_for_if_its_order_cannot_be_written(folder, said) -> None:
    cloud = Cloud()
    orders = folder.path / "orders"
    orders.rmdir()
    orders.write_text("in the way")
    with pytest.raises(RunError, match="no machine is asked for"):
        machines_of(folder, cloud, said).start(1, (), SPOT)
    assert not cloud.orders


def test_machines_of_an_order_whose_answer_was_lost_are_found_by_its_token(folder, said) -> None:
    def lose() -> None:
        raise CloudError("no answer")

    cloud = Cloud(hidden_s=0.2)
    cloud.after = lose
    started = machines_of(folder, cloud, said).start(1, (), SPOT)
    assert [each.id for each in started] == ["m0"]
    assert len(cloud.orders) == 1


def test_machines_of_an_order_that_fails_late_are_found_although_no_list_shows_them_at_once(
    folder, said
) -> None:
    def lose() -> None:
        machines.look()  # as a thread does meanwhile
        time.sleep(0.6)  # longer than a list is not believed
        raise CloudError("no answer in time")

    cloud = Cloud(hidden_s=0.9)
    cloud.after = lose
    machines = machines_of(folder, cloud, said)
    started = machines.start(1, (), SPOT)
    assert [each.id for each in started] == ["m0"]
    assert folder.intents()[0].ids == ("m0",)


@pytest.mark.parametrize("late_s", [0.0, 0.6])
def test_machines_of_a_process_that_died_in_its_order_are_ended_although_no_list_shows_them_yet(
    folder, said, late_s
) -> None:
    """Also if a list was made before they are shown, and arrives after they must be."""

    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    cloud = Cloud(hidden_s=0.3)
    cloud.on_its_way = lambda: time.sleep(late_s)
    cloud.after = die
    with pytest.raises(Killed):
        machines_of(folder, cloud, said).start(2, (), SPOT)
    assert cloud.live
    ended = machines_of(folder, cloud, said).end_all()
    assert ended == 1
    assert "waiting for 1 machine to end" in said
    assert not cloud.live
    assert not folder.intents()


def test_a_machine_that_was_just_started_is_ended_although_no_list_shows_it_yet(
    folder, said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_CLOUD_SETTLE_S", "2")  # which ending waits for
    cloud = Cloud(hidden_s=1e9)
    started = machines_of(folder, cloud, said).start(2, (), SPOT)
    assert len(started) == 2
    machines_of(folder, cloud, said).end_all()
    assert not cloud.live


def test_a_wait_is_reported_when_it_changes_and_again_while_it_lasts(
    said, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = WaitReport(said.append)
    for text in ("waiting for 2 machines", "waiting for 2 machines", "waiting for 1 machine"):
        waiting.say(text)
    assert said == ["waiting for 2 machines", "waiting for 1 machine"]
    monkeypatch.setattr("hvd_elastic.engines.base._TELL_S", 0.0)
    waiting.say("waiting for 1 machine")
    assert said[2].startswith("waiting for 1 machine (after ")


def test_an_order_that_started_nothing_is_forgotten_when_the_list_can_be_believed(
    folder, said
) -> None:
    cloud = Cloud()
    for offer in POOLS:
        cloud.refusals[offer.name] = CloudError("connection reset")
    machines = machines_of(folder, cloud, said)
    with pytest.raises(CloudError, match=r"connection reset|started no machine"):
        machines.start(1, (), SPOT)
    assert not folder.intents()


def test_machines_of_others_are_left_alone(folder, said) -> None:
    cloud = Cloud()
    for name, tags in {
        "other user": {"cloud": "lab", "owner": "bob@elsewhere", "token": "1"},
        "other cloud": {"cloud": "lab2", "owner": owner(), "token": "2"},
    }.items():
        cloud.machines[name] = Machine(name, "running", "", POOLS[0], tags)
        cloud.since[name] = 0.0
    machines = machines_of(folder, cloud, said)
    machines.start(2, (), SPOT)
    assert machines.end_all() == 2
    assert cloud.live == {"other user", "other cloud"}


def test_what_was_ended_by_hand_does_not_stop_the_rest_from_being_ended(folder, said) -> None:
    cloud = Cloud()
    machines = machines_of(folder, cloud, said)
    machines.start(3, (), SPOT)
    del cloud.machines["m1"]
    machines.end_all()
    assert not cloud.live


def test_a_run_leaves_a_cloud_that_was_ended_and_started_again_to_others(folder, said) -> None:
    cloud = Cloud()
    definition = folder.read()
    with folder.use("run r1"):
        machines = machines_of(folder, cloud, said, "run r1")
        machines.start(1, (), SPOT)
        machines_of(CloudFolder("lab"), cloud, said).end_all()  # cloud down
        CloudFolder("lab").remove()
        assert machines.look() == []
        again = CloudFolder("lab")
        again.write(definition)
        with again.use("run r2"):
            others = machines_of(again, cloud, said, "run r2")
            others.start(1, (), SPOT)
            for use in (machines.look, lambda: machines.start(1, (), SPOT)):
                with pytest.raises(RunError, match="ended and started again"):
                    use()
            assert len(others.look()) == 1


def test_nothing_is_started_while_a_cloud_is_being_ended_or_after_its_deadline(
    folder, said
) -> None:
    cloud = Cloud()
    machines = machines_of(folder, cloud, said)
    change(folder, deadline=time.time() - 1)
    with pytest.raises(RunError, match="time of cloud lab is over"):
        machines.start(1, (), SPOT)
    change(folder, deadline=time.time() + 60)
    machines_of(folder, cloud, said).mark_ending()
    with pytest.raises(RunError, match="being ended"):
        machines.start(1, (), SPOT)
    assert not cloud.orders


# -- which pools --------------------------------------------------------------------------------


def test_spot_machines_are_spread_over_the_pools(folder, said) -> None:
    cloud = Cloud()
    machines_of(folder, cloud, said).start(4, (), SPOT)
    assert [(order.offer, order.count) for order in cloud.orders] == [(POOLS[0], 2), (POOLS[1], 2)]


def test_machines_that_no_list_shows_yet_count_with_their_price_and_market(
    folder, said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_ELASTIC_CLOUD_SETTLE_S", "600")
    cloud = Cloud(hidden_s=1e9)
    change(folder, budget=1.0)
    machines = machines_of(folder, cloud, said)
    machines.start(1, (), MachinePlan(0, 1, ""))
    (hidden,) = machines_of(folder, cloud, said).look()
    assert (hidden.offer, hidden.state) == (POOLS[2], "starting")
    with pytest.raises(UnsupportedError, match="exceed --budget 1 an hour"):
        machines.start(1, [hidden], SPOT)


def test_a_pool_without_capacity_is_left_out_and_the_next_one_is_asked(folder, said) -> None:
    cloud = Cloud()
    cloud.refusals[POOLS[0].name] = CapacityError("no capacity")
    machines = machines_of(folder, cloud, said)
    assert len(machines.start(4, (), SPOT)) == 4
    machines.start(1, (), SPOT)
    asked = [order.offer.zone for order in cloud.orders]
    assert asked.count("a") == 1
    assert f"{POOLS[0].name}: no capacity" in said


@pytest.mark.parametrize(
    ("first", "kind"),
    [(CapacityError, CapacityError), (ThrottledError, CapacityError), (QuotaError, QuotaError)],
)
def test_only_what_may_end_soon_counts_as_a_lack_of_capacity(folder, said, first, kind) -> None:
    cloud = Cloud()
    cloud.refusals = {POOLS[0].name: first("first"), POOLS[1].name: QuotaError("second")}
    with pytest.raises(CloudError, match="first") as raised:
        machines_of(folder, cloud, said).start(1, (), SPOT)
    assert type(raised.value) is kind


def test_on_demand_machines_are_started_only_if_they_are_asked_for(folder, said) -> None:
    cloud = Cloud()
    for offer in POOLS[:2]:
        cloud.refusals[offer.name] = CapacityError("no capacity")
    machines = machines_of(folder, cloud, said)
    with pytest.raises(CapacityError, match="no machine can be had now"):
        machines.start(2, (), SPOT)
    assert [each.offer.spot for each in machines.start(2, (), MachinePlan(8, 1, ""))] == [False]


def test_a_budget_bounds_the_price_of_all_machines(folder, said) -> None:
    cloud = Cloud()
    change(folder, budget=1.0)
    machines = machines_of(folder, cloud, said)
    held = machines.start(8, (), MachinePlan(8, 8, ""))
    assert sum(each.offer.price or 0.0 for each in held) <= 1.0
    with pytest.raises(UnsupportedError, match="exceed --budget 1 an hour"):
        machines.start(1, held, MachinePlan(8, 1, ""))


def test_a_budget_holds_although_the_provider_says_little_of_its_machines(folder, said) -> None:
    """As a user's programs may do: a machine has an id and a state at least."""
    cloud = Cloud()
    cloud.pools = [replace(offer, slots=4) for offer in POOLS]
    change(folder, budget=1.0)
    machines = machines_of(folder, cloud, said)

    def say_little() -> None:
        for name, each in cloud.machines.items():
            cloud.machines[name] = replace(each, offer=Offer(""))

    cloud.after = say_little
    machines.start(1, (), SPOT)
    (there,) = machines.live()
    assert there.offer == cloud.pools[0]
    (other,) = machines.start(1, [there], MachinePlan(8, 0, ""))
    assert other.offer == cloud.pools[1]
    held = [*machines.live(), *machines.start(8, machines.live(), SPOT)]
    assert len(cloud.machines) == 3
    assert sum(each.offer.price or 0.0 for each in held) <= 1.0


def test_a_budget_allows_no_machine_whose_price_nobody_knows(folder, said) -> None:
    cloud = Cloud()
    change(folder, budget=100.0)
    cloud.pools = [replace(offer, price=None) for offer in POOLS]
    with pytest.raises(UnsupportedError, match="no price is known"):
        machines_of(folder, cloud, said).start(1, (), MachinePlan(8, 1, ""))
    assert not cloud.orders


def test_refused_credentials_end_the_search_at_once(folder, said) -> None:
    cloud = Cloud()
    cloud.refusals[POOLS[0].name] = CredentialsError("expired")
    with pytest.raises(CredentialsError, match="expired"):
        machines_of(folder, cloud, said).start(1, (), SPOT)
    assert len(cloud.orders) == 1


@pytest.mark.parametrize(
    ("error", "usable"),
    [
        (CapacityError, {POOLS[1], POOLS[2], POOLS[3]}),
        (QuotaError, {POOLS[2], POOLS[3]}),
        (UnsupportedError, {POOLS[1], POOLS[3]}),
    ],
)
def test_what_is_left_out_depends_on_the_refusal_and_ends(error, usable) -> None:
    ladder = Ladder()
    ladder.refused(POOLS[0], error("no"), 100.0)
    assert {*ladder.usable(POOLS, 100.0 + LEFT_OUT_S - 1)} == usable
    assert {*ladder.usable(POOLS, 100.0 + LEFT_OUT_S)} == {*POOLS}


def test_too_many_calls_pause_everything_longer_each_time(folder, said) -> None:
    cloud, ladder = Cloud(), Ladder()
    ladder.refused(POOLS[0], ThrottledError("slow down"), 0.0)
    first = ladder.not_before
    ladder.refused(POOLS[0], ThrottledError("slow down"), first)
    assert ladder.not_before - first > first > 0
    cloud.refusals[POOLS[0].name] = ThrottledError("slow down")
    machines = machines_of(folder, cloud, said)
    for _ in range(3):
        with pytest.raises(CloudError):
            machines.start(1, (), SPOT)
    assert len(cloud.orders) == 1
