"""Shares and limits of users on a cluster, as its file ``limits.toml`` has them."""

from __future__ import annotations

import functools
import grp
import math
import os
import pwd
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import parse_duration
from hvd_elastic.jobs.job import Job
from hvd_elastic.jobs.rights import user_id, user_name
from hvd_elastic.replaced_files import SavedFile

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
_HALF_LIFE = "7d"
ALL = "all users together"
_MEMBERS_S = 60
"""How long it is taken for granted who is in a group [s]."""


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user, the members of a group or all users may have together; None: no limit.

    Attributes:
        weight: share of the slots, relative to that of others.
        most_slots, most_jobs: slots and jobs at a time.
        longest_time: how long one job may run, such as ``8h``.
    """

    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] | None = None
    most_slots: _AtLeastOne | None = None
    most_jobs: _AtLeastOne | None = None
    longest_time: str | None = None

    def __post_init__(self) -> None:
        if self.longest_time is not None:
            parse_duration("longest_time", self.longest_time)

    @property
    def longest_s(self) -> float:
        """Return how long one job may run [s]."""
        if self.longest_time is None:
            return math.inf
        return parse_duration("longest_time", self.longest_time)


class Limits(msgspec.Struct, frozen=True):
    """The limits of a cluster.

    Attributes:
        all: of all users together.
        each: of each user, as far as those of ``user`` say nothing else.
        group: of the members of groups together, by name.
        user: of users, by name.
        half_life_s: time after which the use of slots counts half [s].
    """

    all: Limit = Limit()
    each: Limit = Limit()
    group: dict[str, Limit] = {}
    user: dict[str, Limit] = {}
    half_life_s: float = parse_duration("half_life", _HALF_LIFE)

    @classmethod
    def read(cls, path: Path) -> Limits:
        """Return the limits of a file; none if there is no such file.

        Raises:
            UsageError: the file cannot be used; says why, with the line.
        """
        try:
            return _LimitsText(path.read_text(encoding="utf-8")).limits()
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, msgspec.MsgspecError, UsageError) as error:
            raise UsageError(f"the limits in {path} cannot be used: {error}") from error

    @property
    def has_shares(self) -> bool:
        """Whether slots are shared by weight."""
        said = (self.each, *self.group.values(), *self.user.values())
        return any(limit.weight is not None for limit in said)

    def of_user(self, name: str) -> Limit:
        """Return the limits of one user."""
        own = self.user.get(name, Limit())
        said = {key: value for key, value in msgspec.structs.asdict(own).items() if value}
        return msgspec.structs.replace(self.each, **said)

    def applying(self, user: int | None) -> dict[str, Limit]:
        """Return all limits that the jobs of a user have to keep, by whose they are, in words."""
        name = user_name(user)
        found = {name: self.of_user(name)}
        groups = [group for group in self.group if _is_member(user, group)]
        found |= {f"group {group}": self.group[group] for group in groups}
        return {**found, ALL: self.all}

    def longest(self, job: Job) -> tuple[float, str]:
        """Return how long a job may run [s], and by whose limit, in words; empty: its own."""
        own = job.request.time_limit_s
        found = [(math.inf if own is None else own, "")]
        found += [
            (limit.longest_s, name) for name, limit in self.applying(job.request.user).items()
        ]
        return min(found, key=lambda each: each[0])

    def weights(self, users: Iterable[int | None]) -> dict[str, float]:
        """Return the weight of each user, by name.

        That of a group is divided among those of its members who are asked for, by their weights.
        """
        own = {user: self.of_user(user_name(user)).weight or 1.0 for user in users}
        team = {
            user: next((g for g in self.group if self.group[g].weight and _is_member(user, g)), "")
            for user in own
        }
        found = {}
        for user, weight in own.items():
            group = team[user]
            if group:
                together = sum(own[other] for other in own if team[other] == group)
                weight *= (self.group[group].weight or 1.0) / together
            found[user_name(user)] = weight
        return found


def _is_member(user: int | None, group: str) -> bool:
    uid = os.getuid() if user is None else user
    return group in _groups_of(uid, int(time.monotonic() // _MEMBERS_S))


@functools.lru_cache(maxsize=1024)
def _groups_of(uid: int, _minute: int) -> set[str]:
    """Return the names of a user's groups; none if nobody knows the user any more."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return set()
    found = set()
    for gid in os.getgrouplist(entry.pw_name, entry.pw_gid):
        try:
            found.add(grp.getgrgid(gid).gr_name)
        except KeyError:  # a group without a name
            continue
    return found


class _LimitsText:
    """The text of ``limits.toml``, and where it says what."""

    def __init__(self, text: str) -> None:
        self._text = text

    def limits(self) -> Limits:
        """Return the limits.

        Raises:
            UsageError, MsgspecError: they make no sense; says why, with the line.
        """
        found: dict[str, Any] = {}
        for key, value in msgspec.toml.decode(self._text).items():
            if key == "half_life":
                found["half_life_s"] = self._checked("", key, parse_duration, key, str(value))
            elif key in ("all", "each"):
                found[key] = self._limit(key, value)
            elif key in ("group", "user") and isinstance(value, Mapping):
                found[key] = {}
                for name, said in value.items():
                    self._checked(f"{key}.{name}", "", _check_name, key, name)
                    found[key][name] = self._limit(f"{key}.{name}", said)
            else:
                self._refuse("", key, f"{key} is not known")
        limits = Limits(**found)
        if limits.all.weight is not None:
            self._refuse("all", "weight", "all users together have no others to share with")
        self._refuse_unreachable(limits)
        return limits

    def _limit(self, table: str, said: Any) -> Limit:
        if not isinstance(said, Mapping):
            self._refuse(table, "", f"write it as a table, [{table}]")
        limit = Limit()
        for key, value in said.items():
            one = self._checked(table, key, msgspec.convert, {key: value}, Limit)
            limit = msgspec.structs.replace(limit, **{key: getattr(one, key)})
        return limit

    def _refuse_unreachable(self, limits: Limits) -> None:
        """Raise UsageError for a limit that a smaller one makes meaningless."""
        pairs = [("all", limits.all, "each", limits.each)]
        for name, limit in limits.group.items():
            pairs.append(("all", limits.all, f"group.{name}", limit))
        for name, limit in limits.user.items():
            pairs.append(("all", limits.all, f"user.{name}", limit))
            groups = (group for group in limits.group if _is_member(user_id(name), group))
            pairs += [(f"group.{g}", limits.group[g], f"user.{name}", limit) for g in groups]
        for upper, most, lower, less in pairs:
            for key in ("most_slots", "most_jobs", "longest_time"):
                above, below = (_number(each, key) for each in (most, less))
                if above < below < math.inf:
                    self._refuse(
                        lower,
                        key,
                        f"it is more than that of [{upper}] in line {self._line(upper, key)}, so "
                        "it is never reached",
                    )

    def _checked(self, table: str, key: str, make: Callable[..., Any], *said: Any) -> Any:
        """Return what a function makes of a part of the text; say where that is if it cannot."""
        try:
            return make(*said)
        except (ValueError, msgspec.MsgspecError, UsageError) as error:
            self._refuse(table, key, str(error))

    def _refuse(self, table: str, key: str, why: str) -> NoReturn:
        what = ".".join(each for each in (table, key) if each)
        raise UsageError(
            f"line {self._line(table, key)}, {what}: {why}. Valid are half_life, and weight (not "
            "under [all]), most_slots, most_jobs and longest_time under [user.NAME], [each], "
            "[group.NAME] and [all]"
        )

    def _line(self, table: str, key: str) -> int:
        """Return the line of a key of a table, or else that of the table."""
        wanted = ".".join(filter(None, (table, key)))
        found, current = 1, ""
        for number, line in enumerate(self._text.splitlines(), 1):
            words = re.sub(r"[\"'\s]", "", line)
            if head := re.match(r"\[([^\]]+)\]", words):
                name = current = head[1]
            else:
                name = ".".join(filter(None, (current, words.split("=")[0])))
            if name == wanted:
                return number
            if wanted.startswith(f"{name}."):
                found = number
        return found


def _check_name(kind: str, name: str) -> None:
    if kind == "user":
        user_id(name)
        return
    try:
        grp.getgrnam(name)
    except KeyError:
        raise UsageError(f"this machine has no group {name!r}; see: getent group") from None


def _number(limit: Limit, key: str) -> float:
    value = limit.longest_s if key == "longest_time" else getattr(limit, key)
    return math.inf if value is None else float(value)


class LimitsFile:
    """The limits of a cluster as they are now: its file is read again whenever it is saved.

    Args:
        path: the file; there need be none.
        warn: called with the reason when it cannot be used; the earlier limits stay then.

    Raises:
        UsageError: it cannot be used at the start.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._file = SavedFile(path)
        self.limits = Limits.read(path)
        self._mistake = ""

    @property
    def problem(self) -> str:
        """Why what was saved last is not used; empty: it is."""
        if self._file.settles:
            return f"{self._path} was saved a moment ago, and is read within seconds"
        return self._mistake

    def changed(self, now: float) -> bool:
        """Read the file if it was saved and nobody is writing it; return whether it was read.

        Args:
            now: present time [monotonic s].
        """
        if not self._file.saved(now):
            return False
        limits, mistake = self.limits, ""
        try:
            limits = Limits.read(self._path)
        except UsageError as error:
            mistake = f"{error}; the earlier ones stay"
        if not self._file.mark_read():  # what was read may be a part
            return False
        self.limits, self._mistake = limits, mistake
        if mistake:
            self._warn(mistake)
        return True
