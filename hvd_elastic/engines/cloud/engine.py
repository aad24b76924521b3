"""Lead a run on the machines of a cloud: asked for, kept and given back as needed."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hvd_elastic.control.endings import StopCause
from hvd_elastic.engines.base import HostSource, WaitReport, repeating
from hvd_elastic.engines.cloud.machines import LEFT_OUT_S, Machines
from hvd_elastic.engines.cloud.needs import RunNeeds
from hvd_elastic.engines.cloud.provider import (
    CapacityError,
    CloudError,
    CredentialsError,
    Machine,
    ThrottledError,
)
from hvd_elastic.engines.cloud.reach import Reach
from hvd_elastic.engines.cloud.records import CloudFolder, setting_s
from hvd_elastic.engines.growth import Grant, Growth, Limits, growing
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count, duration_words
from hvd_elastic.hosts.connection import Connection, SshOptions
from hvd_elastic.hosts.hostfile import Host, Hostfile, write_hostfile
from hvd_elastic.hosts.ssh import connect, own_address_towards
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.policy.objective import Objective
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import (
    HostDrained,
)

_START_LIMIT_S = 600.0
"""How long a machine may take until it answers over ssh [s]; then it is given up."""
_LOOK_S = 5.0
_WAIT_S, _LONGEST_WAIT_S = 1.0, 10.0
_RENEWALS = 4
"""How often a lease is renewed before it would end."""
_STAY_TRIES = 3
"""How often a lease is tried to be renewed for the last time."""
_LEAVE_BEFORE_S = 120.0
"""How long before the deadline of its machines a run is stopped [s]: it writes a checkpoint."""
_GIVE_BACK_AFTER_S = 120.0


def leave_before_s() -> float:
    """Return how long before the deadline of its machines a run is stopped [s]."""
    return setting_s("LEAVE_BEFORE", _LEAVE_BEFORE_S)


class CloudHosts:
    """The machines of a cloud as hosts: as what growth asks for, and as the engine of a run.

    Args:
        hostfile: where the hosts are written.
        machines: the machines.
        reach: how they are reached.
        tell: called with what is done, in words.
        objective: what the run is after; its deadline may force machines on demand.

    Attributes:
        least: how many machines are needed to begin.
        slots: workers that each machine can hold.
    """

    host_word = grant_word = "machine"
    least = slots = 1
    may_be_none = True
    """Whether the hostfile may name no host while there is no machine."""
    hosts: tuple[str, ...] = ()
    """All hosts are machines that were asked for."""

    def __init__(
        self,
        hostfile: Path,
        machines: Machines,
        reach: Reach,
        tell: Callable[[str], None],
        objective: Objective | None = None,
    ) -> None:
        self._hostfile, self.machines, self._reach, self._tell = hostfile, machines, reach, tell
        self._ssh = SshOptions(config_path=reach.options.config_path)
        self._since: dict[str, float] = {}
        """Since when live machines are known, by id [monotonic s]."""
        self._prepared: dict[str, float] = {}
        """When the commands that prepare machines were last seen to run, by id [monotonic s]."""
        self._renewed: dict[str, float] = {}
        """When the leases of usable machines were renewed, by id [monotonic s]."""
        self._why: dict[str, str] = {}
        """Why machines cannot be reached, as of the last try, by id."""
        self.given_up: dict[str, str] = {}
        """Why machines were never used, by id."""
        self._lost: set[str] = set()
        """Machines that the run has left since it lost them, by id."""
        self._clash = (0.0, "")
        """Until when no machine is asked for [monotonic s], and which two have one address."""
        self._joined: dict[str, Machine] = {}
        self._written: list[Host] = []
        self._there: dict[str, Machine] = {}
        """All machines that have not ended, by id."""
        self._connections: list[Connection] = []
        self._changing = threading.Lock()
        self._start_limit_s = setting_s("START_LIMIT", _START_LIMIT_S)
        self.start_s: float | None = None
        """Longest time that a machine took from its order until it could be used [s]."""
        self.needs = RunNeeds(machines, tell, objective)
        orders = machines.folder.intents()
        self._found = {each.token for each in orders if not machines.by or each.by != machines.by}
        """Tokens of the orders of earlier commands, such as ``cloud up``."""
        self._ending: set[str] = set()
        """Machines that are not needed any more, by id; own ones are ended again until they have
        ended."""
        self._spare: set[str] = set()
        """Machines of ``cloud up`` that are not needed, by id, as of the last list."""

    # -- as the engine of a run ------------------------------------------------------------

    def connect(self, host: Host) -> Connection:
        """See :class:`hvd_elastic.hosts.connection.Engine`."""
        connection = connect(host, self._ssh)
        with self._changing:
            self._connections = [each for each in self._connections if each.alive] + [connection]
        return connection

    def address_towards(self, hosts: list[Host]) -> str:
        """See :class:`hvd_elastic.hosts.connection.Engine`."""
        return own_address_towards(hosts[0], self._ssh) if hosts else "127.0.0.1"

    # -- as the owner of what growth asks for ----------------------------------------------

    def list(self) -> list[Grant]:
        try:
            self._write()  # which has failed if the disk was full
            there = self.machines.look()
            self._check_addresses(there)
        except (RunError, OSError):  # machines that train stay meanwhile: nothing else renews them
            known = [each for each in self._there.values() if each.id in self._renewed]
            self._renew([each for each in known if each.id not in self._ending], time.monotonic())
            raise
        self._there = {each.id: each for each in there}
        now, live = time.monotonic(), {each.id: each for each in there if each.is_live}
        for each in self._since.keys() - live.keys() - self._renewed.keys() - self._ending:
            machine = self._there.get(each)
            self._give_up(each, (machine and machine.why) or "it has ended by itself")
        self._since = {each: self._since.get(each, now) for each in live}
        self._renewed = {each: at for each, at in self._renewed.items() if each in live}
        running = [each for each in live.values() if each.state == "running"]
        left = self._ending | self.given_up.keys()
        self._renew([each for each in running if each.id not in left], now)
        self._ending.intersection_update(live)
        # The command that prepares a machine takes the time that it takes.
        self._prepared |= dict.fromkeys(self._reach.preparing, now)
        began = {each: max(at, self._prepared.get(each, at)) for each, at in self._since.items()}
        late = {each for each in live if now - began[each] >= self._start_limit_s}
        if self.start_s is None:  # it may be this computer that cannot reach any
            late -= {each for each in late if live[each].tags.get("token") in self._found}
        for each in (late | self._reach.unfit) & live.keys() - self._renewed.keys():
            self._give_up(each, self._why.get(each, f"it is {live[each].state}"))
        ending = [each for each in live if each in self.given_up or each in self._ending]
        self._spare = {*ending} - {*self._stop(ending)}
        return [
            Grant(each.id, each.state, each.address, runs=each.id in self._renewed)
            for each in live.values()
            if each.id not in ending
        ]

    def _renew(self, running: Sequence[Machine], now: float) -> None:
        """Renew the leases that are due, and see which machines can be used since now."""
        every_s = self.machines.lease_s / _RENEWALS
        due = [each for each in running if now - self._renewed.get(each.id, -every_s) >= every_s]
        for each, why in self._reach.renew(due, self.machines.lease_s).items():
            self._why[each] = why
            if not why:
                if each not in self._renewed:
                    took_s = time.monotonic() - self._since[each]
                    self.start_s = max(self.start_s or 0.0, took_s)
                self._renewed[each] = now
            elif each in self._renewed:
                self._tell(f"the lease of machine {each} could not be renewed: {why}")

    def _check_addresses(self, there: Sequence[Machine]) -> None:
        """Give up the newer one of two machines with one address, by which hosts are told apart.

        Raises:
            CloudError: ``cloud up`` has started them.
        """
        known: dict[str, str] = {}
        usable = [each for each in there if each.is_live and each.id not in self.given_up]
        for each in sorted(usable, key=lambda each: (each.id not in self._renewed, each.started)):
            if each.address and known.setdefault(each.address, each.id) != each.id:
                why = (
                    f"machines {known[each.address]} and {each.id} have one address, "
                    f"{each.address}: each needs an address of its own, also if their ports differ"
                )
                if not self.machines.by:
                    raise CloudError(why)
                self._give_up(each.id, why)
                # The next one may well get that address too.
                self._clash = time.monotonic() + setting_s("LEFT_OUT", LEFT_OUT_S), why

    def _give_up(self, machine_id: str, why: str) -> None:
        if machine_id not in self.given_up:
            self.given_up[machine_id] = why
            self._reach.end_preparation(machine_id)
            self._tell(f"machine {machine_id} cannot be used, and is ended: {why}")

    def _stop(self, ids: Iterable[str]) -> Sequence[str]:
        """End machines but those of ``cloud up`` that are only not needed; return which."""
        tokens = self.machines.started_by(self.machines.by)
        there = [self._there[each] for each in ids if each in self._there]
        own = {each.id for each in there if each.tags.get("token") in tokens}
        ending = [each.id for each in there if each.id in own | self.given_up.keys()]
        if ending:
            self.machines.stop(ending)
        return ending

    def ask(self, without: Sequence[str], named: str) -> None:
        """Use a machine of ``cloud up`` again that the run has left, or start one."""
        if self._spare:  # as one that has just started: it is given up if it cannot be reached
            machine_id = min(self._spare)
            self._spare.discard(machine_id)
            self._ending.discard(machine_id)
            self._renewed.pop(machine_id, None)
            self._since.pop(machine_id, None)
        else:
            self.begin(1, self.machines.live())

    def begin(self, number: int, live: Sequence[Machine]) -> None:
        """Ask for machines beside those that live.

        Raises:
            RunError: none can be had.
        """
        until, why = self._clash
        if time.monotonic() < until:
            raise CloudError(why)
        if self.machines.left_s > leave_before_s():
            # Spot machines that are leaving count in the plan, which has their replacements.
            left = self.needs.leaving
            held = [each for each in live if each.offer.spot or each.address not in left]
            self.machines.start(number, held, self.needs.plan(held, self.start_s))

    def begin_with(self, growth: Growth, stopped: Callable[[], bool] = lambda: False) -> None:
        """Ask for the fewest machines, and return when they can be used.

        Without capacity they are asked for again, up to the end of the cloud's time.

        Args:
            growth: asks for those that end meanwhile.
            stopped: returns whether nobody needs them any more.

        Raises:
            RunError: they cannot be had, or are not needed any more.
        """
        live = self.machines.live()
        if (missing := self.least - len(live)) > 0:
            with contextlib.suppress(CapacityError, ThrottledError):  # each pool was told
                self.begin(missing, live)
                self._tell(f"{count(missing, 'machine')} asked for")
        self.wait(growth, stopped)

    def wait(
        self, growth: Growth | None = None, stopped: Callable[[], bool] = lambda: False
    ) -> Sequence[Machine]:
        """Wait for machines, and return those that can be used.

        Args:
            growth: has the fewest machines join; None: all that were started are waited for.
            stopped: returns whether nobody needs them any more.

        Raises:
            RunError: they cannot be had, or are not needed any more.
        """
        began, waiting, wait_s = time.monotonic(), WaitReport(self._tell), _WAIT_S
        least_left_s = 0.0 if growth is None else leave_before_s()  # a run drains them then
        while True:
            try:
                error = ""
                if growth is None:
                    grants = self.list()
                    if all(each.runs for each in grants):
                        return [self._there[each.grant_id] for each in grants]
                else:
                    growth.look_at_grants(time.monotonic())
            except CredentialsError:
                raise
            except CloudError as refusal:  # tried again
                error = str(refusal)
            if growth is not None and len(self._joined) >= self.least:  # more may join later
                return [*self._joined.values()]
            reasons = {error, *(self._why.get(each, "") for each in self._since)} - {""}
            number = len(self._since) if growth is None else self.least
            text = f"{len(self._renewed)} of {count(number, 'machine')} can be used"
            text = ": ".join(filter(None, (text, "; ".join(sorted(reasons)))))
            waiting.say(text)
            if stopped():
                raise RunError("it was stopped before it began")
            waited_s = time.monotonic() - began
            if waited_s >= 2 * self._start_limit_s or self.machines.left_s <= least_left_s:
                raise RunError(
                    f"cloud {self.machines.definition.name}: {text}, after "
                    f"{duration_words(waited_s)}: hvd-elastic cloud list"
                )
            if self._reach.preparing & (self._since.keys() - self._ending):
                began = time.monotonic()
            if self._since:
                wait_s = _WAIT_S
            else:  # no capacity
                began, wait_s = time.monotonic(), min(1.2 * wait_s, _LONGEST_WAIT_S)
            time.sleep(wait_s)

    def cancel(self, grant_ids: Sequence[str]) -> None:
        for each in {*grant_ids} & self._lost - self.given_up.keys():
            self.given_up[each] = "it is lost"
            self._tell(f"machine {each} is lost, and is ended")
        self._ending |= {*grant_ids}
        self._stop(grant_ids)

    def join_host(self, grant: Grant) -> None:
        with self._changing:
            self._joined[grant.grant_id] = self._there[grant.grant_id]
        self._write()

    def leave_host(self, grant_id: str, *, is_lost: bool = False) -> None:
        if is_lost:
            self._lost.add(grant_id)
        with self._changing:
            self._joined.pop(grant_id, None)
        self._write()

    def in_use(self, grant_id: str) -> bool:
        machine = self._there.get(grant_id)
        with self._changing:
            return machine is not None and any(
                each.alive and each.host.name == machine.address for each in self._connections
            )

    def stop_host(self, host: str) -> None:
        """End the machine of a host that the run has left."""
        with self._changing:
            ids = [each.id for each in self._joined.values() if each.address == host]
        if ids:
            self.given_up |= dict.fromkeys(ids, "it is drained")
            self._tell(f"{host} is drained, so its machine is ended")
            self.cancel(ids)

    def end(self) -> None:
        """End the machines that the run or cluster has asked for; those of ``cloud up`` stay."""
        self.machines.close()
        by = self.machines.by
        if tokens := self.machines.started_by(by):
            ended = self.machines.end_all(tokens)
            self._tell(f"{count(ended, 'machine')} of the {by.split()[0]} ended")

    def stay(self) -> dict[str, str]:
        """Have the machines stay up to their deadline; return why some cannot, by id.

        Raises:
            CloudError: the provider does not answer.
        """
        self.machines.close()
        try:
            left = self.machines.live()
        except CloudError:
            left = [each for each in self._there.values() if each.is_live]
            if not left:
                raise
        failed: dict[str, str] = {}
        for number in range(_STAY_TRIES):
            if number:
                time.sleep(_WAIT_S)
            renewed = self._reach.renew(left, max(1.0, self.machines.left_s))
            failed = {each: why for each, why in renewed.items() if why}
            left = [each for each in left if each.id in failed]
            if not left:
                break
        return failed

    def _write(self) -> None:
        """Have the hostfile name the machines that have joined."""
        with self._changing:
            hosts = self._reach.hosts_of(self._joined.values())
        if hosts != self._written and (hosts or self.may_be_none):
            write_hostfile(self._hostfile, hosts)
            self._written = hosts


class CloudSource(HostSource):
    """The machines of a cloud that this computer knows."""

    def __init__(self, name: str) -> None:
        self._folder = CloudFolder.open(name)

    def hosts(self, environment: Mapping[str, str]) -> Hostfile:
        """Return the most machines that the run may get, under names of no meaning."""
        definition = self._folder.read()
        offers = Machines(self._folder, definition.open_provider(), _tell).offers()
        offer = min(offers, key=lambda each: each.price or 0.0)
        numbers = range(1, definition.most + 1)
        hosts = [Host(f"machine{n}", slots=offer.slots, price=offer.price) for n in numbers]
        return Hostfile(tuple(hosts), f"cloud {definition.name}")

    @property
    def preemption(self) -> str | None:
        """Return what ``--preemption`` takes for the machines; None: nothing."""
        return self._folder.read().open_provider().preemption

    def adapt(self, spec: RunSpec) -> RunSpec:
        """Return the specification with the ssh configuration and the notices of the cloud."""
        definition = self._folder.read()
        config, preemption = spec.ssh_config, spec.preemption
        if spec.preemption_command is None:
            preemption = preemption or self.preemption
        return replace(spec, ssh_config=config or definition.ssh_config, preemption=preemption)

    def lead(
        self, folder: RunFolder, environment: Mapping[str, str]
    ) -> AbstractContextManager[CloudHosts]:
        return cloud_engine(folder, self._folder)


@contextlib.contextmanager
def cloud_engine(folder: RunFolder, cloud: CloudFolder) -> Iterator[CloudHosts]:
    """Yield the machines of a cloud as the hosts of a run, when the fewest can be used.

    Machines that the run has asked for are ended with it; those of ``cloud up`` stay.

    Raises:
        RunError: another run uses the cloud, no machine can be had, or the run was stopped.
    """
    by = f"run {folder.run_id}"
    spec = RunSpec.from_dict(folder.read_run(), folder.run_id)
    with using(cloud, by, folder.hosts, spec, _tell, CloudHosts) as (hosts, growth):
        try:
            hosts.begin_with(growth, lambda: bool([*folder.take_requests("stop")]))
            with growing(growth, folder, _tell), _watching(folder, hosts, _tell):
                yield hosts
        finally:
            hosts.end()


_Hosts = TypeVar("_Hosts", bound=CloudHosts)


@contextlib.contextmanager
def using(
    cloud: CloudFolder,
    by: str,
    hostfile: Path,
    spec: RunSpec,
    tell: Callable[[str], None],
    kind: type[_Hosts],
) -> Iterator[tuple[_Hosts, Growth]]:
    """Yield the machines of a cloud as hosts of a run or cluster, and how their number changes.

    Args:
        by: the run or cluster, which alone uses the cloud in the block.
        hostfile: where the hosts are written.

    Raises:
        RunError: somebody else uses the cloud, or it does not answer.
    """
    definition = cloud.read()
    with contextlib.closing(cloud.use(by)):
        machines = Machines(cloud, definition.open_provider(), tell, by)
        slots = min(each.slots for each in machines.offers())
        least = max(1, definition.least, -(-spec.min_np // slots))
        limits = Limits(
            max(definition.most, least),
            slots,
            leave_before_s=0.0,
            give_back_after_s=setting_s("GIVE_BACK", _GIVE_BACK_AFTER_S),
            least=least,
            most_pending=definition.most,
            look_s=setting_s("LOOK", _LOOK_S),
        )
        hosts = kind(hostfile, machines, Reach(definition), tell, spec.objective)
        hosts.least, hosts.slots = least, slots
        yield hosts, Growth(hosts, limits, spec, tell)


@contextlib.contextmanager
def _watching(folder: RunFolder, hosts: CloudHosts, tell: Callable[[str], None]) -> Iterator[None]:
    """End the machine of each host that is drained, and stop the run before the deadline."""
    follower = folder.follow_events()
    for event in follower.poll():  # what an earlier leader has seen
        hosts.needs.take_event(event)

    def look() -> bool:
        for event in follower.poll():
            hosts.needs.take_event(event)
            if isinstance(event, HostDrained):
                with contextlib.suppress(RunError):  # tried again
                    hosts.stop_host(event.host)
        left_s = hosts.machines.left_s
        if left_s > leave_before_s():
            return False
        tell(f"the machines end in {duration_words(max(0.0, left_s))}: the run stops")
        folder.send_request("stop", {"reason": StopCause.MACHINES.value})
        return True

    with repeating("drained machines", _WAIT_S, look):
        yield


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  cloud: {text}", file=sys.stderr, flush=True)  # noqa: T201
