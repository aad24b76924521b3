"""Start, find and end the machines of one cloud, so that none is lost from sight.

Every order is written down before it is sent (:mod:`.records`), and a machine is forgotten only
when the provider says that it has ended.
"""

from __future__ import annotations

import contextlib
import getpass
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hvd_elastic.engines.base import WaitReport
from hvd_elastic.engines.cloud.lease import LEASE_S, user_data
from hvd_elastic.engines.cloud.provider import (
    CapacityError,
    CloudError,
    CredentialsError,
    Machine,
    Offer,
    Order,
    Provider,
    QuotaError,
    ThrottledError,
    UnsupportedError,
)
from hvd_elastic.engines.cloud.records import CloudFolder, Definition, Intent, owner, setting_s
from hvd_elastic.errors import RunError, SshError
from hvd_elastic.formatting import count
from hvd_elastic.hosts.ssh_config import load_ssh_config
from hvd_elastic.policy.spot import MachinePlan, next_order, useful_pools

LEFT_OUT_S = 600.0
"""How long a pool without capacity is not asked again [s]; AWS ParallelCluster waits as long."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
_SETTLE_S = 30.0
"""How long after an order a list without its machines is not believed [s]."""
_OFFERS_S = 300.0
"""How long prices are used [s]."""
_POLL_S, _LONGEST_POLL_S = 1.0, 10.0
_TRIES = 8
"""How often a call that fails is repeated while machines are being ended."""
_REFUSED = (CapacityError, QuotaError, ThrottledError, UnsupportedError, CredentialsError)
"""Errors after which it is certain that nothing was started."""


class Ladder:
    """Knows which pools are left out, and since when nothing at all may be asked.

    What is left out depends on what was said: one pool (no capacity), all zones of a type (a quota
    is for a region), both markets of a type in a zone (the type does not exist there), or
    everything for a pause that doubles each time (too many calls).

    Args:
        left_out_s: how long a pool is left out [s].
    """

    def __init__(self, left_out_s: float = LEFT_OUT_S) -> None:
        self._left_out_s = left_out_s
        self._refusals: dict[tuple[str, str, bool | None], tuple[float, str]] = {}
        """Until when and why pools are left out, by type, zone and market."""
        self.not_before = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def refused(self, offer: Offer, error: CloudError, now: float) -> None:
        """Take a refusal into account."""
        if isinstance(error, ThrottledError):
            self.not_before = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return
        zone = "" if isinstance(error, QuotaError) else offer.zone
        spot = None if isinstance(error, UnsupportedError) else offer.spot
        self._refusals[offer.type, zone, spot] = now + self._left_out_s, str(error)

    def started(self) -> None:
        """Take into account that the cloud has started machines."""
        self._pause_s = _FIRST_PAUSE_S

    def why_not(self, offer: Offer, now: float) -> str:
        """Return why a pool is left out; empty: it may be asked."""
        zone, spot = offer.zone, offer.spot
        for key in ((offer.type, zone, spot), (offer.type, "", spot), (offer.type, zone, None)):
            until, why = self._refusals.get(key, (now, ""))
            if until > now:
                return why
        return ""

    def usable(self, offers: Sequence[Offer], now: float) -> list[Offer]:
        """Return the pools that may be asked."""
        return [offer for offer in offers if not self.why_not(offer, now)]


class Machines:
    """The machines of one cloud.

    Args:
        folder: folder of the cloud, with its definition.
        provider: its provider.
        tell: called with what is done, in words.
        by: run or cluster on whose behalf machines are started; empty: ``cloud up``.
        definition: what is asked for; None: what the folder says.
    """

    def __init__(
        self,
        folder: CloudFolder,
        provider: Provider,
        tell: Callable[[str], None],
        by: str = "",
        definition: Definition | None = None,
    ) -> None:
        self.folder, self._provider, self._tell, self.by = folder, provider, tell, by
        self.definition = definition or folder.read()
        self.lease_s = setting_s("LEASE", LEASE_S)
        self._settle_s = setting_s("SETTLE", _SETTLE_S)
        self._ladder = Ladder(setting_s("LEFT_OUT", LEFT_OUT_S))
        self._offers: tuple[Offer, ...] = ()
        self._offers_until = -math.inf
        self._seen_intents: dict[str, float] = {}
        """Since when this process knows of orders, by token [monotonic s]."""
        self._is_closed = False

    @property
    def tags(self) -> dict[str, str]:
        return {"cloud": self.definition.name, "owner": owner()}

    @property
    def left_s(self) -> float:
        """Return the time until all machines end [s]."""
        return self.definition.deadline - time.time()

    # -- what is there ---------------------------------------------------------------------

    def look(self) -> list[Machine]:
        """Return the machines that have not ended, those included that no list shows yet.

        Raises:
            CloudError: the provider does not answer.
            RunError: what is written of them cannot be read.
        """
        self.folder.check_use()
        # Both before the list: it may miss what is ordered meanwhile, and its answer may come late.
        intents = self.folder.intents()
        settled = {intent.token for intent in intents if self._is_settled(intent)}
        machines = {each.id: each for each in self._provider.list(self.tags)}
        for intent in intents:
            self._settle(intent, machines, is_settled=intent.token in settled)
        return [each for each in machines.values() if each.state != "ended"]

    def live(self) -> list[Machine]:
        """Return the machines that start or run; errors as of :meth:`look`."""
        return [each for each in self.look() if each.is_live]

    def _settle(self, intent: Intent, machines: dict[str, Machine], *, is_settled: bool) -> None:
        """Compare an order with the list: add what is not shown yet, forget what has ended."""
        found = {each.id for each in machines.values() if each.tags.get("token") == intent.token}
        for each in found:
            machines[each] = _completed(machines[each], intent.offer)
        if not is_settled:
            for each in set(intent.ids or ()) - machines.keys():
                tags = {**self.tags, "token": intent.token}
                machines[each] = Machine(each, "starting", "", intent.offer, tags)
            return
        if intent.ids is None and found:
            self.folder.answer(intent, tuple(sorted(found)))
        left = [each for each in found if machines[each].state != "ended"]
        if not left:
            self.folder.forget(intent.token)

    def _is_settled(self, intent: Intent) -> bool:
        """Return whether a list must show the machines of an order by now.

        Either clock may say so: this computer's may have been set, or the order may be old.
        """
        seen_s = time.monotonic() - self._seen_intents.setdefault(intent.token, time.monotonic())
        return time.time() - intent.at >= self._settle_s or seen_s >= self._settle_s

    def started_by(self, by: str) -> set[str]:
        """Return the tokens of what a run or cluster has ordered."""
        return {intent.token for intent in self.folder.intents() if intent.by == by}

    # -- more ------------------------------------------------------------------------------

    def offers(self) -> Sequence[Offer]:
        """Return all pools of the definition, with prices that are at most some minutes old.

        Raises:
            CloudError: the provider does not answer.
        """
        if time.monotonic() >= self._offers_until:
            asked = self.definition
            found = self._provider.offers(asked.types, asked.zones, asked.spot)
            slots = asked.slots
            if not found:
                raise UnsupportedError(f"no pool has machines of type {', '.join(asked.types)}")
            self._offers = tuple(
                found if slots is None else (replace(o, slots=slots) for o in found)
            )
            self._offers_until = time.monotonic() + _OFFERS_S
        return self._offers

    def preview(self, number: int, plan: MachinePlan) -> list[tuple[Offer, int]]:
        """Return what :meth:`start` would start if every pool had enough, and start nothing."""
        found: list[tuple[Offer, int]] = []
        planned: list[Machine] = []
        while order := self._next_order(plan, planned, number - len(planned), ()):
            found.append(order)
            planned += [Machine("", "starting", "", order[0])] * order[1]
        return found

    def start(self, number: int, held: Sequence[Machine], plan: MachinePlan) -> list[Machine]:
        """Start up to so many machines, pool by pool, and return those that were started.

        Args:
            held: the machines that there are.
            plan: how many of each kind there may be afterwards.

        Raises:
            CapacityError: none can be had now, but later there may be some; says why of each pool.
            CloudError: none can be had at all, in the same words.
            CredentialsError: no call can succeed.
            RunError: an order cannot be written down, or the machines are being ended.
        """
        if self._ladder.not_before > time.monotonic():
            raise ThrottledError("too many calls: machines are asked for again after a pause")
        started: list[Machine] = []
        refused: dict[Offer, CloudError] = {}
        while order := self._next_order(
            plan, [*held, *started], number - len(started), refused.keys()
        ):
            offer, most = order
            try:
                got = self._order(offer, most)
                started += got
                self._ladder.started()
                if len(got) < most:
                    raise CapacityError(f"it had {len(got)} of {most}")
            except CredentialsError:
                raise
            except CloudError as error:
                refused[offer] = error
                self._ladder.refused(offer, error, time.monotonic())
                self._tell(f"{offer.name}: {error}")
                if isinstance(error, ThrottledError):
                    break
        if not started and number:
            now = time.monotonic()
            reasons = dict.fromkeys(
                f"{offer.name}: {why}"
                for offer in self.offers()
                if (why := refused.get(offer) or self._ladder.why_not(offer, now))
            )
            why_none = "; ".join(reasons) or self._no_pool(held)
            kinds = [type(error) for error in refused.values()] if reasons else [UnsupportedError]
            busy = not kinds or {CapacityError, ThrottledError} & {*kinds}
            kind = CapacityError if busy else kinds[0]
            raise kind(f"no machine can be had now: {why_none}")
        return started

    def _next_order(
        self,
        plan: MachinePlan,
        held: Sequence[Machine],
        number: int,
        without: Collection[Offer],
    ) -> tuple[Offer, int] | None:
        """Return the pool to ask now, and for how many machines; None: no pool is of use."""
        offers = {_pool(offer): offer for offer in self.offers()}
        # A machine is of the pool that it came from, whose price may be another one now.
        there = Counter(offers.get(_pool(each.offer), each.offer) for each in held)
        usable = self._ladder.usable([*offers.values()], time.monotonic())
        budget = self.definition.budget
        if budget is not None:
            budget -= sum(each.offer.price or 0.0 for each in held)
        usable = [offer for offer in usable if offer not in without]
        return next_order(plan, usable, there, number, budget)

    def _no_pool(self, held: Sequence[Machine]) -> str:
        asked = self.definition
        if len(held) >= asked.most:
            return f"{count(len(held), 'machine')} of at most {asked.most} are there"
        if asked.budget is not None and all(offer.price is None for offer in self.offers()):
            return f"no price is known, so that --budget {asked.budget:g} allows none"
        if asked.budget is not None:
            return f"every pool would exceed --budget {asked.budget:g} an hour"
        if asked.spot and not any(offer.spot for offer in self.offers()):
            return f"there are no spot machines of type {', '.join(asked.types)}"
        if asked.spot and not useful_pools(self.offers(), spot=True):
            return "spot machines cost as much as those on demand"
        return "only the deadline of the run allows machines on demand"

    def _order(self, offer: Offer, number: int) -> list[Machine]:
        """Send an order that is on disk before."""
        with self.folder.changing():
            if self._is_closed:
                raise RunError(f"the {self.by or 'command'} ends, so it asks for no machine")
            self.folder.check_use()
            self.definition = self.folder.read()
            if self.definition.ending:
                raise RunError(f"cloud {self.definition.name} is being ended: cloud down")
            if self.left_s <= 0:
                raise RunError(
                    f"the time of cloud {self.definition.name} is over: hvd-elastic cloud down "
                    f"{self.definition.name}, then cloud up with a new --max-hours"
                )
            token = secrets.token_hex(16)
            intent = Intent(token, offer, number, time.time(), self.by)
            deadline = datetime.fromtimestamp(self.definition.deadline, timezone.utc)
            tags = {**self.tags, "token": token, "deadline": deadline.isoformat(timespec="seconds")}
            script = user_data(
                self.left_s,
                min(self.lease_s, self.left_s),
                _login(self.definition),
                self.definition.public_key,
            )
            self.folder.begin(intent)
            order = Order(offer, number, token, tags, script, self.left_s)
            try:
                started = list(self._provider.start(order))
            except _REFUSED:
                self.folder.forget(token)
                raise
            except CloudError as error:
                self._tell(f"{offer.name}: {error}; whether it has started machines is looked up")
                # Believed so long from now on: the call may have lasted until it was given up.
                intent = replace(intent, at=time.time())
                self._seen_intents[token] = time.monotonic()
                with contextlib.suppress(
                    RunError
                ):  # of a full disk; it is there, with its old time
                    self.folder.begin(intent)
            else:
                self.folder.answer(intent, tuple(each.id for each in started))
                return [_completed(each, offer) for each in started]
        return self._look_up(intent)

    def _look_up(self, intent: Intent) -> list[Machine]:
        """Return the machines of an order whose answer was lost, as soon as a list can be believed.

        Raises:
            CloudError: it has started none.
        """
        while not self._is_settled(intent):
            time.sleep(_POLL_S)
        tags = {**self.tags, "token": intent.token}
        found = [each for each in self._provider.list(tags) if each.state != "ended"]
        if found:
            self.folder.answer(intent, tuple(each.id for each in found))
            return [_completed(each, intent.offer) for each in found]
        self.folder.forget(intent.token)
        raise CloudError("the order was not answered, and has started no machine")

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Send no more orders, and return when none is being sent: a thread may be about to."""
        self._is_closed = True
        if self.folder.exists:  # else ``cloud down`` has removed it
            with contextlib.suppress(OSError), self.folder.changing():
                pass

    def stop(self, ids: Sequence[str]) -> None:
        """Have machines terminated for good.

        Raises:
            CloudError: the provider does not answer.
        """
        self._provider.stop(ids)

    def end_all(self, tokens: Collection[str] | None = None) -> int:
        """End the machines, and return how many there were when the provider says that all ended.

        Args:
            tokens: end only what these orders have started; None: everything.

        Raises:
            CloudError: the provider does not answer, so that machines may still be there.
        """
        ended: set[str] = set()
        due_at: dict[str, float] = {}
        fails, wait_s, waiting = 0, _POLL_S, WaitReport(self._tell)
        while True:
            try:
                left = {
                    m.id for m in self.look() if tokens is None or m.tags.get("token") in tokens
                }
                now = time.monotonic()
                if due := [each for each in left if now >= due_at.get(each, now)]:
                    self._provider.stop(due)
                    # Asked again now and then: some start after they were told to stop.
                    due_at |= dict.fromkeys(due, now + 3 * _LONGEST_POLL_S)
            except CredentialsError:
                raise
            except CloudError as error:
                fails, text = fails + 1, f"{error}; trying again"
                if fails == _TRIES:
                    raise CloudError(
                        f"machines may still be running, since the cloud does not answer: {error}. "
                        f"Repeat it: hvd-elastic cloud down {self.definition.name}"
                    ) from error
            else:
                ended |= left
                fails, text = 0, f"waiting for {count(len(left), 'machine')} to end"
                if not left:
                    text = "an order was not answered: looking for its machines"
                    unanswered = {each.token for each in self.folder.intents() if each.ids is None}
                    if not (unanswered if tokens is None else unanswered & {*tokens}):
                        return len(ended)
            waiting.say(text)
            time.sleep(wait_s)
            wait_s = min((2.0 if fails else 1.2) * wait_s, _LONGEST_POLL_S)

    def mark_ending(self) -> None:
        """Have nobody start machines of this cloud from now on."""
        with self.folder.changing():
            self.definition = replace(self.folder.read(), ending=True)
            self.folder.write(self.definition)


def _completed(machine: Machine, asked: Offer) -> Machine:
    """Return a machine with what its provider does not say of its pool, from its order."""
    unknown, told = asdict(Offer("")), asdict(machine.offer)
    left_out = {name: value for name, value in asdict(asked).items() if told[name] == unknown[name]}
    return replace(machine, offer=replace(machine.offer, **left_out))


def _login(definition: Definition) -> str:
    """Return the user that ssh logs in as on a new machine, whose address is not known yet."""
    path = definition.ssh_config
    entry: Mapping[str, Any] = {}
    if not definition.login:
        with contextlib.suppress(SshError):  # ssh says it when it connects
            entry = load_ssh_config(None if path is None else Path(path)).lookup("*")
    return definition.login or str(entry.get("user") or getpass.getuser())


def _pool(offer: Offer) -> tuple[str, str, bool]:
    return offer.type, offer.zone, offer.spot
