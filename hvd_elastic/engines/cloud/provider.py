"""Define what the engine asks of a cloud: four calls, their values and their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hvd_elastic.errors import RunError, UsageError

TAG_PREFIX = "hvd-elastic:"
"""What the key of each tag begins with at a provider whose tags are shared by all programs."""

State = Literal["starting", "running", "stopping", "ended"]
"""States of a machine. All but ``ended`` may cost money."""


class CloudError(RunError):
    """A cloud refuses a call, or does not answer it."""


class CapacityError(CloudError):
    """The cloud has no machine of this type in this zone now."""


class QuotaError(CloudError):
    """The account may have no more machines of this type."""


class ThrottledError(CloudError):
    """The account has made too many calls."""


class CredentialsError(CloudError):
    """There are no credentials, or the cloud does not accept them; no other call will succeed."""


class UnsupportedError(CloudError):
    """The type does not exist, or not in this zone; asking for it again is of no use."""


@dataclass(frozen=True)
class Offer:
    """A pool of machines that can be asked for.

    Attributes:
        type: type of machine, such as ``g5.12xlarge``.
        zone: zone, such as ``us-east-1b``; empty: the provider has no zones.
        spot: whether the provider may end these machines at short notice.
        price: price of a machine [currency per hour]; None: unknown.
        slots: number of workers that a machine can hold.
    """

    type: str
    zone: str = ""
    spot: bool = False
    price: float | None = None
    slots: int = 1

    @property
    def name(self) -> str:
        """Return the offer in words.

        >>> Offer("g5.xlarge", "us-east-1b", spot=True).name
        'g5.xlarge in us-east-1b (spot)'
        """
        place = f" in {self.zone}" if self.zone else ""
        return f"{self.type}{place}{' (spot)' if self.spot else ''}"


@dataclass(frozen=True)
class Order:
    """A request for machines of one offer.

    Attributes:
        offer: the pool.
        count: how many machines to start at most; the provider may start fewer.
        token: unique to this order. A provider that sees it again starts nothing new.
        tags: what the machines are labelled with in the same call: ``cloud`` (its name),
            ``owner``, ``token`` and ``deadline`` (ISO 8601 time in UTC).
        user_data: script that the machine runs as root when it boots.
        max_s: time after boot at which the machine must have ended [s].
    """

    offer: Offer
    count: int
    token: str
    tags: Mapping[str, str]
    user_data: str
    max_s: float


@dataclass(frozen=True)
class Machine:
    """A machine, as the provider lists it.

    Attributes:
        id: the provider's name for it, never used again for another machine.
        state: see :data:`State`.
        address: address or name at which this computer reaches its sshd; empty: none yet.
        offer: the pool that it came from.
        tags: its tags, without the prefix.
        started: ISO 8601 time of its start; empty: unknown.
        port: port of its sshd; None: 22, or what the ssh configuration says.
        why: why the provider has ended or is ending it; empty: unknown.
    """

    id: str
    state: State
    address: str
    offer: Offer
    tags: Mapping[str, str] = field(default_factory=dict)
    started: str = ""
    port: int | None = None
    why: str = ""

    @property
    def is_live(self) -> bool:
        """Return whether it is starting or running."""
        return self.state in ("starting", "running")


class Provider(Protocol):
    """Starts, lists and stops machines. All calls may raise :class:`CloudError`.

    Attributes:
        preemption: what ``--preemption`` takes for its machines; None: nothing.
    """

    preemption: str | None

    def offers(self, types: Sequence[str], zones: Sequence[str], spot: bool) -> Sequence[Offer]:
        """Return the pools with their present prices.

        Args:
            types: types of machine.
            zones: zones; empty: all.
            spot: whether spot pools are returned beside those on demand.
        """

    def start(self, order: Order) -> Sequence[Machine]:
        """Start machines, at least one.

        Raises:
            CapacityError, QuotaError, ThrottledError, UnsupportedError: nothing was started.
            CredentialsError: likewise.
            CloudError: nobody knows whether machines were started: they are looked up by token.
        """

    def list(self, tags: Mapping[str, str]) -> Sequence[Machine]:
        """Return all machines with these tags; those that have ended may be missing.

        Args:
            tags: tags that a machine must have; empty: all machines that have a ``cloud`` tag.
        """

    def stop(self, ids: Sequence[str]) -> None:
        """Have machines terminated for good. One that has ended already, or is unknown, is well."""


def provider_named(name: str, settings: Mapping[str, str]) -> Provider:
    """Return a provider.

    Raises:
        UsageError: there is none of that name, or its settings are not valid.
        CloudError: it cannot be used, such as without credentials.
    """
    if name == "command":
        from hvd_elastic.engines.cloud.command import CommandProvider

        return CommandProvider(settings)
    if name == "aws":
        from hvd_elastic.engines.cloud.aws import AwsProvider

        return AwsProvider(settings)
    raise UsageError(f"--provider {name!r} is not known; valid: aws, command")
