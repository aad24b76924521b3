"""Check the options of ``run`` and ``simulate`` that set the objective of the policy."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_elastic.cli.numbers import parse_duration
from hvd_elastic.errors import HostfileError, UsageError
from hvd_elastic.formatting import count, hosts_named

if TYPE_CHECKING:
    from hvd_elastic.policy.objective import Objective
    from hvd_elastic.policy.prices import PricedHost

_BUDGET = re.compile(r"(\d+(?:\.\d+)?)(?:/h)?")


def parse_budget(text: str) -> float:
    """Return a price [currency per hour].

    >>> parse_budget("40/h"), parse_budget("2.5")
    (40.0, 2.5)
    """
    found = _BUDGET.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"--budget takes a price for an hour such as 40/h, not '{text}'")
    return float(found[1])


@dataclass(frozen=True)
class ScalingOptions:
    """The options as given on the command line; None: not given."""

    policy: str
    objective: str | None
    min_speedup_per_slot: float | None
    budget: str | None
    deadline: str | None
    target_examples: float | None

    def check(
        self,
        hostfile: Path | None,
        mpi: bool,
        hosts: Sequence[PricedHost] | None = None,
        min_np: int = 1,
        pinned: Sequence[PricedHost] = (),
        np: int | None = None,
    ) -> None:
        """Check the options before the run starts.

        Args:
            hostfile: hostfile of the run.
            mpi: whether the job runs under mpirun.
            hosts: the hosts, if they are not those of a hostfile.
            min_np: fewest slots.
            pinned: hosts that are used as a whole.
            np: number of slots at the start; None: the fewest.

        Raises:
            UsageError: the options are not valid; says what is.
        """
        if self.policy in ("fixed", "adaptdl"):
            self._refuse_what_belongs_to_goodput()
            return
        if self.policy != "goodput":
            return  # the caller refuses an unknown policy
        if mpi:
            raise UsageError("a job under --mpi has a fixed size: leave --policy goodput out")
        self.as_objective()
        if self.objective == "cost":
            if hosts is None:
                hosts = self._hosts_of(hostfile)
            self._check_prices(hosts, min_np, pinned, np)

    def as_objective(self) -> Objective:
        """Return the objective of the policy.

        Raises:
            UsageError: the options do not fit together.
        """
        from hvd_elastic.policy.objective import Objective

        fields = self.fields()
        self._refuse_what_does_not_belong(fields["objective"])
        return Objective(
            kind=fields["objective"],
            min_speedup_per_slot=fields["min_speedup_per_slot"],
            budget=fields["budget"],
            deadline_s=fields["deadline_s"],
            target=fields["target_examples"],
        )

    def fields(self) -> dict[str, Any]:
        """Return the fields of a :class:`RunSpec`."""
        share = self.min_speedup_per_slot
        return {
            "policy": self.policy,
            "objective": self.objective or "goodput",
            "min_speedup_per_slot": 0.5 if share is None else share,
            "budget": None if self.budget is None else parse_budget(self.budget),
            "deadline_s": None
            if self.deadline is None
            else parse_duration("--deadline", self.deadline),
            "target_examples": self.target_examples,
        }

    def _refuse_what_belongs_to_goodput(self) -> None:
        for name in (
            *("objective", "min_speedup_per_slot", "budget", "deadline", "target_examples"),
        ):
            if getattr(self, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} is of use with --policy goodput only; add it")

    def _refuse_what_does_not_belong(self, objective: str) -> None:
        from hvd_elastic.policy.objective import OBJECTIVES

        if objective not in OBJECTIVES:
            valid = ", ".join(OBJECTIVES)
            raise UsageError(f"--objective {objective!r} is not known; valid: {valid}")
        for name, owner in (
            ("min_speedup_per_slot", "efficiency"),
            *((name, "cost") for name in ("budget", "deadline", "target_examples")),
        ):
            if getattr(self, name) is not None and objective != owner:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} belongs to --objective {owner}; add that")
        if objective == "cost" and self.budget is None and self.deadline is None:
            raise UsageError("--objective cost needs a --budget, or a --deadline")
        if (self.deadline is None) != (self.target_examples is None):
            raise UsageError(
                "--deadline and --target-examples belong together: the target says what to do "
                "by the deadline"
            )
        if (self.min_speedup_per_slot or 0.0) > 1:
            raise UsageError(
                f"--min-speedup-per-slot {self.min_speedup_per_slot:g} is above 1, and no slot "
                "brings more than one alone does: give a share of that, such as 0.5"
            )

    def _hosts_of(self, hostfile: Path | None) -> Sequence[PricedHost]:
        from hvd_elastic.hosts.hostfile import parse_hostfile, require_prices

        if hostfile is None:
            raise UsageError("--objective cost needs a --hostfile that has price= for each host")
        hosts = parse_hostfile(hostfile)
        try:
            require_prices(hosts)
        except HostfileError as error:
            raise UsageError(f"--objective cost: {error}") from error
        return hosts.hosts

    def _check_prices(
        self,
        hosts: Sequence[PricedHost],
        min_np: int,
        pinned: Sequence[PricedHost],
        np: int | None,
    ) -> None:
        if any(host.price is None for host in hosts):
            raise UsageError("--objective cost needs a price for each host")
        if self.budget is None:
            return
        from hvd_elastic.policy.prices import cheapest_hosts, hourly_price

        kept = {host.name for host in pinned}
        least = max(min_np, np or 0)
        missing = max(0, least - sum(host.slots for host in pinned))
        others = cheapest_hosts([host for host in hosts if host.name not in kept], missing)
        price = math.inf if others is None else hourly_price([*pinned, *others])
        if price > parse_budget(self.budget):
            flag = "--np" if least == np else "--min-np"
            what = [f"{count(least, 'slot')} ({flag})"] if least > 1 else []
            what += [f"{hosts_named(sorted(kept))} (--pin-hosts)"] if kept else []
            raise UsageError(
                f"--budget {self.budget} cannot be met: "
                f"{' with '.join(what) or 'the cheapest host'} cost"
                f"{'' if what else 's'} {price:g} per hour at the least. Give at least {price:g}/h"
            )
