"""The shares of a cluster's users: what they had of the slots, kept in a file of the cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from hvd_elastic.jobs.job import Job, JobStatus
from hvd_elastic.jobs.limits import ALL, Limit, Limits
from hvd_elastic.jobs.rights import user_name
from hvd_elastic.policy.schedule.shares import Shares, Use
from hvd_elastic.replaced_files import write_whole

_SAVE_S = 10.0
"""Time between two writes of the file [s]: how much use a daemon that is killed forgets."""


class ClusterShares:
    """The shares of a cluster, which outlive the daemon.

    Args:
        path: the file; there need be none.
        warn: called with the reason when it cannot be read or written.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._saved_at = 0.0
        self._is_on = False
        """Whether slots are shared by weight, as of the last decision."""
        self._shares = Shares()
        try:
            self._shares.uses = msgspec.json.decode(path.read_bytes(), type=dict[str, Use])
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            warn(f"what users had of the slots begins anew: {path} cannot be read: {error}")

    def weigh(self, limits: Limits, jobs: Iterable[Job]) -> Shares | None:
        """Return the shares by which jobs are to be decided about; None: users have none.

        Args:
            jobs: jobs that run or wait.
        """
        self._is_on = limits.has_shares
        if not self._is_on:
            self._shares = Shares()
            return None
        self._shares.half_life_s = limits.half_life_s
        self._shares.weights = limits.weights({job.request.user for job in jobs})
        return self._shares

    def count_use(self, running: Iterable[Job], now: float) -> None:
        """Count the slots that are held since the last call.

        Args:
            running: all jobs that run.
            now: present time [Unix s].
        """
        if not self._is_on:
            return
        held = Counter[str]()
        for job in running:
            held[user_name(job.request.user)] += job.slots
        self._shares.count_use(now, held)
        if abs(now - self._saved_at) < _SAVE_S:
            return
        self._saved_at = now
        try:
            write_whole(self._path, msgspec.json.encode(self._shares.uses), mode=0o600)
        except OSError as error:
            self._warn(f"cannot write {self._path}: {error.strerror}")

    def rows(self, limits: Limits, active: Iterable[Job]) -> dict[str, Any]:
        """Return limits, shares and what is used now, for JSON.

        Args:
            active: all jobs that run or wait.
        """
        jobs, slots = Counter[str](), Counter[str]()
        uses = self._shares.uses
        users = {*limits.user, *uses}
        for job in active:
            users.add(user_name(job.request.user))
            if job.status is JobStatus.RUNNING:
                for whose in limits.applying(job.request.user):
                    jobs[whose] += 1
                    slots[whose] += job.slots
        used = sum(use.used for use in uses.values()) or math.inf

        def row(whose: str, limit: Limit) -> dict[str, Any]:
            found = {"jobs": jobs[whose], "slots": slots[whose], **_limit_fields(limit)}
            if limits.has_shares and (use := uses.get(whose)):
                found |= {"fair_share": use.fair / used, "used_share": use.used / used}
            return found

        return {
            "half_life_s": limits.half_life_s if limits.has_shares else None,
            "users": [{"user": name, **row(name, limits.of_user(name))} for name in sorted(users)],
            "each": _limit_fields(limits.each),
            "groups": [
                {"group": name, **row(f"group {name}", limit)}
                for name, limit in limits.group.items()
            ],
            "all": row(ALL, limits.all),
        }


def _limit_fields(limit: Limit) -> dict[str, Any]:
    found = msgspec.structs.asdict(limit)
    del found["longest_time"]
    return {**found, "longest_s": None if math.isinf(limit.longest_s) else limit.longest_s}
