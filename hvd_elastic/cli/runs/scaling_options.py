"""The options of ``run`` and ``simulate`` that set the objective of the policy."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from hvd_elastic.cli.options import number_option, option, parse_duration
from hvd_elastic.errors import HostfileError, UsageError
from hvd_elastic.formatting import count, hosts_named
from hvd_elastic.hosts.hostfile import Hostfile, require_prices
from hvd_elastic.leader.spec import check_objective
from hvd_elastic.policy.objective import Objective

if TYPE_CHECKING:
    from hvd_elastic.policy.objective import PricedHost

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


def flag_of(name: str) -> str:
    """Return the flag of an option.

    >>> flag_of("min_speedup_per_slot")
    '--min-speedup-per-slot'
    """
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class ObjectiveOptions:
    """The options as given on the command line; None: not given."""

    objective: Annotated[
        str | None, option("of --policy goodput: goodput, efficiency or cost (default: goodput)")
    ] = None
    min_speedup_per_slot: Annotated[
        float | None,
        number_option(
            "of --objective efficiency: least speedup divided by slots (default: 0.5)",
            "--min-speedup-per-slot",
            above=True,
        ),
    ] = None
    budget: Annotated[
        str | None,
        option(
            "of --objective cost: most that the hosts in use may cost, such as 40/h",
            metavar="PRICE/h",
        ),
    ] = None
    deadline: Annotated[
        str | None,
        option(
            "of --objective cost: reach --target-examples within, such as 6h or 90m", metavar="TIME"
        ),
    ] = None
    target_examples: Annotated[
        float | None,
        number_option(
            "of --deadline: useful examples to be reached, such as 5e7",
            "--target-examples",
            above=True,
        ),
    ] = None

    def as_objective(self, policy: str) -> Objective:
        """Return the objective of a policy.

        Raises:
            UsageError: the options do not fit together, or the policy has no objective.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        check_objective(policy, given, flag_of)
        share = self.min_speedup_per_slot
        return Objective(
            self.objective or Objective.kind,
            Objective.min_speedup_per_slot if share is None else share,
            None if self.budget is None else parse_budget(self.budget),
            None if self.deadline is None else parse_duration("--deadline", self.deadline),
            self.target_examples,
        )

    def check_prices(
        self,
        hosts: Hostfile | Sequence[PricedHost] | None,
        min_np: int,
        np: int | None = None,
        pinned: Sequence[PricedHost] = (),
    ) -> None:
        """Check that ``--objective cost`` has prices, and a budget that some hosts meet.

        Args:
            hosts: hosts of the run; None: there is no hostfile.
            min_np: fewest slots.
            np: number of slots at the start; None: the fewest.
            pinned: hosts that are used as a whole.

        Raises:
            UsageError: it cannot be met; says why.
        """
        if self.objective != "cost":
            return
        if hosts is None:
            raise UsageError("--objective cost needs a --hostfile that has price= for each host")
        if isinstance(hosts, Hostfile):
            try:
                require_prices(hosts)
            except HostfileError as error:
                raise UsageError(f"--objective cost: {error}") from error
        elif any(host.price is None for host in hosts):
            raise UsageError("--objective cost needs a price for each host")
        if self.budget is None:
            return
        from hvd_elastic.policy.objective import cheapest_hosts, hourly_price

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
