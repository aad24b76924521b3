"""Lead a run on the machines of a cloud: asked for, kept and given back as needed."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from hvd_elastic.control.endings import StopCause
from hvd_elastic.engines.base import HostSource, repeating
from hvd_elastic.engines.cloud.machines import Machines
from hvd_elastic.engines.cloud.provider import CloudError, CredentialsError, Machine, Offer
from hvd_elastic.engines.cloud.providers import provider_of
from hvd_elastic.engines.cloud.reach import Reach
from hvd_elastic.engines.cloud.records import CloudFolder, Definition, setting_s
from hvd_elastic.engines.growth import Grant, Growth, Limits, growing
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import count, duration_words
from hvd_elastic.hosts.connection import Connection, SshOptions
from hvd_elastic.hosts.hostfile import Host, Hostfile, write_hostfile
from hvd_elastic.hosts.ssh import connect, own_address_towards
from hvd_elastic.jobs.progress import Measured
from hvd_elastic.leader.spec import RunSpec
from hvd_elastic.policy.objective import Objective
from hvd_elastic.policy.spot import MachineNeed, plan_machines
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.run_events import (
    AgentStarted,
    HostDrained,
    Metrics,
    ReadEvent,
    RunStarted,
    Warned,
)

START_LIMIT_S = 600.0
"""How long a machine may take until it answers over ssh [s]; then it is given up."""
_LOOK_S = 5.0
_WAIT_S = 1.0
_RENEWALS = 4
"""How often a lease is renewed before it would end."""
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
    """

    host_word = grant_word = "machine"
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
        self._hostfile, self._machines, self._reach, self._tell = hostfile, machines, reach, tell
        self._ssh = SshOptions(config_path=reach.options.config_path)
        self._seen: dict[str, float] = {}
        """Since when machines are awaited, by id [monotonic s]."""
        self._renewed: dict[str, float] = {}
        """When the leases of usable machines were renewed, by id [monotonic s]."""
        self._joined: dict[str, Machine] = {}
        self._there: dict[str, Machine] = {}
        """All machines that have not ended, by id."""
        self._connections: list[Connection] = []
        self._changing = threading.Lock()
        self._start_limit_s = setting_s("START_LIMIT", START_LIMIT_S)
        self.start_s: float | None = None
        """Longest time that a machine took from its order until it could be used [s]."""
        self._objective = objective
        self._measured = Measured()
        self._began = time.time()
        """When the run began [Unix s]."""
        self._slot_throughput = 0.0
        """Examples/s of a slot, as last measured."""
        self._at_risk: set[str] = set()
        """Addresses of machines that the cloud may end soon."""
        self._said = ""

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
        there = self._machines.look()
        self._there = {each.id: each for each in there}
        now = time.monotonic()
        self._seen = {each.id: self._seen.get(each.id, now) for each in there}
        self._renew([each for each in there if each.state == "running"], now)
        self._renewed = {
            each.id: self._renewed[each.id] for each in there if each.id in self._renewed
        }
        late = [
            each.id
            for each in there
            if each.id not in self._renewed and self._is_late(each.id, now)
        ]
        if late:
            self._machines.stop(late)
        return [
            Grant(each.id, each.state, each.address, runs=each.id in self._renewed)
            for each in there
            if each.is_live and each.id not in late
        ]

    def _renew(self, running: Sequence[Machine], now: float) -> None:
        """Renew the leases that are due, and see which machines can be used since now."""
        every_s = self._machines.lease_s / _RENEWALS
        due = [each for each in running if now - self._renewed.get(each.id, -every_s) >= every_s]
        for each, why in self._reach.renew(due, self._machines.lease_s).items():
            if not why:
                if each not in self._renewed:
                    took_s = time.monotonic() - self._seen[each]
                    self.start_s = max(self.start_s or 0.0, took_s)
                self._renewed[each] = now
            elif each not in self._renewed and self._is_late(each, now):
                self._tell(f"machine {each} is given up: {why}")
            elif each in self._renewed:
                self._tell(f"the lease of machine {each} could not be renewed: {why}")

    def _is_late(self, machine_id: str, now: float) -> bool:
        """Return whether a machine is given up that cannot be used so far."""
        late = now - self._seen[machine_id] >= self._start_limit_s
        return late or machine_id in self._reach.unfit

    def ask(self, without: Sequence[str], named: str) -> None:
        self.begin(1)

    def begin(self, number: int) -> None:
        """Ask for machines.

        Raises:
            RunError: none can be had.
        """
        if self._machines.left_s > leave_before_s():
            held = self._machines.look()
            self._machines.start(number, held, self._new_on_demand(number, held))

    def begin_with(self, least: int, growth: Growth, stopped: Callable[[], bool]) -> None:
        """Ask for the fewest machines, and return when they can be used.

        Args:
            growth: asks for those that end meanwhile.
            stopped: returns whether nobody needs them any more.

        Raises:
            RunError: they cannot be had, or are not needed any more.
        """
        name = self._machines.definition.name
        if (missing := least - len(self._machines.look())) > 0:
            self.begin(missing)
            self._tell(f"{count(missing, 'machine')} asked for")
        began, said = time.monotonic(), ""
        while True:
            why = ""
            try:
                growth.look_at_grants(time.monotonic())
            except CredentialsError:
                raise
            except CloudError as error:  # tried again
                why = f": {error}"
            if self.joined >= least:
                return
            text = f"{self.joined} of {count(least, 'machine')} can be used{why}"
            if text != said:
                said = text
                self._tell(text)
            if stopped():
                raise RunError("it was stopped before it began")
            if time.monotonic() - began >= 2 * self._start_limit_s:
                waited = duration_words(time.monotonic() - began)
                raise RunError(f"cloud {name}: {text}, after {waited}: hvd-elastic cloud list")
            time.sleep(_WAIT_S)

    def take_event(self, event: ReadEvent) -> None:
        """Take an event of the run, from which its progress is known."""
        with self._changing:
            self._measured.note_event(event)
            match event:
                case RunStarted():
                    self._began = event.t
                case Metrics(size=size, throughput=speed) if size and speed:
                    self._slot_throughput = speed / size
                case Warned(host_at_risk=host) if host:
                    self._at_risk.add(host)
                case AgentStarted(host=host):
                    self._at_risk.discard(host)  # a new machine at the address of one that is gone

    def _new_on_demand(self, number: int, held: Sequence[Machine]) -> int:
        """Return how many of so many new machines may be on demand."""
        asked = self._machines.definition
        if not asked.spot:
            return number
        offers = self._machines.offers()
        spot = sum(each.offer.spot for each in held)
        deadline_s = None if self._objective is None else self._objective.deadline_s
        need = MachineNeed(
            asked.most,
            spot,
            len(held) - spot,
            sum(each.offer.spot and each.address in self._at_risk for each in held),
            left_s=math.inf if deadline_s is None else self._began + deadline_s - time.time(),
            work_s=self._work_s(asked.most, offers),
            start_s=self.start_s or MachineNeed.start_s,
            budget=asked.budget,
        )
        plan = plan_machines(need, offers)
        kind = plan.reason.partition(":")[0]
        if plan.on_demand and kind != self._said:
            self._tell(plan.reason)
        self._said = kind
        return max(0, plan.on_demand - need.on_demand)

    def _work_s(self, machines: int, offers: Sequence[Offer]) -> float | None:
        """Return how long the rest of the work takes on so many machines [s]; None: not known."""
        target = None if self._objective is None else self._objective.target
        slots = [min(each.slots for each in offers)] * machines
        with self._changing:
            goodput = self._measured.goodput(slots)
            todo = self._measured.remaining(target, None)
        if todo is None:
            return None
        # Without a noise scale, by the last throughput: then each example counts as useful.
        best = self._slot_throughput * sum(slots) if goodput is None else float(goodput[-1])
        return todo / best if best > 0 else None

    def cancel(self, grant_ids: Sequence[str]) -> None:
        self._machines.stop(grant_ids)

    def join_host(self, grant: Grant) -> None:
        with self._changing:
            self._joined[grant.grant_id] = self._there[grant.grant_id]
        self._write()

    def leave_host(self, grant_id: str) -> None:
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
            self._tell(f"{host} is drained, so its machine is ended")
            self._machines.stop(ids)

    def there(self, machine_id: str) -> Machine | None:
        """Return a machine that has not ended, as of the last look."""
        return self._there.get(machine_id)

    @property
    def joined(self) -> int:
        with self._changing:
            return len(self._joined)

    def _write(self) -> None:
        with self._changing:
            hosts = self._reach.hosts_of(self._joined.values())
        if hosts:  # a hostfile that names none cannot be read; lost machines are found lost
            write_hostfile(self._hostfile, hosts)


class CloudSource(HostSource):
    """The machines of a cloud that this computer knows."""

    def __init__(self, name: str) -> None:
        self._folder = CloudFolder.open(name)

    def hosts(self, environment: Mapping[str, str]) -> Hostfile:
        """Return the most machines that the run may get, under names of no meaning."""
        definition = self._folder.read()
        offers = Machines(self._folder, provider_of(definition), _tell).offers()
        offer = min(offers, key=lambda each: each.price or 0.0)
        numbers = range(1, definition.most + 1)
        hosts = [Host(f"machine{n}", slots=offer.slots, price=offer.price) for n in numbers]
        return Hostfile(tuple(hosts), f"cloud {definition.name}")

    def adapt(self, spec: RunSpec) -> RunSpec:
        """Return the specification with the ssh configuration and the notices of the cloud."""
        definition = self._folder.read()
        config, preemption = spec.ssh_config, spec.preemption
        if spec.preemption_command is None:
            preemption = preemption or provider_of(definition).preemption
        return replace(spec, ssh_config=config or definition.ssh_config, preemption=preemption)

    def lead(
        self, folder: RunFolder, environment: Mapping[str, str]
    ) -> AbstractContextManager[CloudHosts]:
        return cloud_engine(folder, self._folder)


@contextlib.contextmanager
def cloud_engine(
    folder: RunFolder, cloud: CloudFolder, tell: Callable[[str], None] | None = None
) -> Iterator[CloudHosts]:
    """Yield the machines of a cloud as the hosts of a run, when the fewest can be used.

    Machines that the run has asked for are ended with it; those of ``cloud up`` stay.

    Raises:
        RunError: another run uses the cloud, no machine can be had, or the run was stopped.
    """
    tell = tell or _tell
    definition, by = cloud.read(), f"run {folder.run_id}"
    spec = RunSpec.from_dict(folder.read_run(), folder.run_id)
    with contextlib.closing(cloud.use(by)):
        machines = Machines(cloud, provider_of(definition), tell, by)
        hosts = CloudHosts(folder.hosts, machines, Reach(definition), tell, spec.objective)
        offers = machines.offers()
        slots = min(each.slots for each in offers)
        least = max(1, definition.least, -(-spec.min_np // slots))
        limits = limits_of(definition, offers, least)
        growth = Growth(hosts, limits, spec, tell)
        try:
            hosts.begin_with(least, growth, lambda: bool([*folder.take_requests("stop")]))
            with growing(growth, folder, tell), _watching(folder, hosts, machines, tell):
                yield hosts
        finally:
            if tokens := machines.started_by(by):
                ended = machines.end_all(tokens)
                tell(f"{count(ended, 'machine')} of the run ended")


def limits_of(definition: Definition, offers: Sequence[Offer], least: int) -> Limits:
    """Return how far a run or cluster on a cloud grows."""
    return Limits(
        max(definition.most, least),
        min(each.slots for each in offers),
        leave_before_s=0.0,
        give_back_after_s=setting_s("GIVE_BACK", _GIVE_BACK_AFTER_S),
        least=least,
        most_pending=definition.most,
        look_s=setting_s("LOOK", _LOOK_S),
    )


@contextlib.contextmanager
def _watching(
    folder: RunFolder, hosts: CloudHosts, machines: Machines, tell: Callable[[str], None]
) -> Iterator[None]:
    """End the machine of each host that is drained, and stop the run before the deadline."""
    follower = folder.follow_events()
    for event in follower.poll():  # what an earlier leader has seen
        hosts.take_event(event)

    def look() -> bool:
        for event in follower.poll():
            hosts.take_event(event)
            if isinstance(event, HostDrained):
                with contextlib.suppress(RunError):  # its lease ends it
                    hosts.stop_host(event.host)
        if machines.left_s > leave_before_s():
            return False
        tell(f"the machines end in {duration_words(max(0.0, machines.left_s))}: the run stops")
        with contextlib.suppress(RunError):  # of a full disk: tried again
            folder.send_request("stop", {"reason": StopCause.MACHINES.value})
            return True
        return False

    with repeating("drained machines", _WAIT_S, look):
        yield


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  cloud: {text}", file=sys.stderr, flush=True)  # noqa: T201
