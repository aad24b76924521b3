"""Several real accounts share virtual hosts by weight: what they have, by the daemon's journal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.testbed.command import Say
from benchmarks.testbed.other_accounts import make_python
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.virtual import VirtualCluster, accounts

_HOSTS, _SLOTS = 6, 2
_JOBS, _MOST_JOBS, _MOST_SLOTS = 6, 4, 8
"""Jobs of each user, and limits of each: more wait than can run."""
_DEADLINE_S = 180.0
_SCRIPT = Path(__file__).with_name("emulated.py")


class _Accounts:
    """Accounts on a virtual cluster, which call ``hvd-elastic`` as users do.

    Args:
        folder: a folder that accounts and hosts see.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / _SCRIPT.name
        shutil.copyfile(_SCRIPT, self.script)
        self.python = make_python(folder / "venv")

    def call(self, user: str, *arguments: object) -> str:
        """Run ``hvd-elastic`` as an account to its end; return what it printed."""
        options = accounts.as_user(user)
        options["env"] |= {"OMP_NUM_THREADS": "1"}
        command = [str(self.python), "-m", "hvd_elastic.cli.app", *map(str, arguments)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
            **options,
        )
        if done.returncode:
            raise RuntimeError(f"{user}: {arguments} ended with {done.returncode}: {done.stderr}")
        return done.stdout


def measure_accounts(weights: Mapping[str, float], minutes: float, say: Say) -> dict[str, Any]:
    """Return what users had of the slots while all of them had jobs that waited.

    Args:
        weights: weight of each user.
        minutes: for how long.
        say: is told what is measured.
    """
    name = f"vcs{os.getpid()}"
    of_account = {f"{name}{number}": weight for number, weight in enumerate(weights.values())}
    users = [*of_account]
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="shares-"))
    folder.chmod(0o755)
    try:
        with VirtualCluster.up(_HOSTS, _SLOTS, name=name, users=users, shares=[folder]) as hosts:
            lab = _Accounts(folder)
            place = folder / "queue"
            shutil.chown(folder, users[0], hosts.name)
            where = ("--group", hosts.name, "--place", place, "--detach")
            lab.call(users[0], "up", "hostfile", *where)
            lines = [
                'half_life = "12h"',
                "[each]",
                f"most_jobs = {_MOST_JOBS}",
                f"most_slots = {_MOST_SLOTS}",
            ]
            for user, weight in of_account.items():
                lines += [f"[user.{user}]", f"weight = {weight}"]
            (place / "limits.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
            owner: dict[str, str] = {}
            for user in users:
                train = ("--", lab.python, lab.script, "--epochs", 100_000, "--example-s", 0.02)
                array = ("--array", f"1-{_JOBS}", "--max-np", 4, "--python", lab.python)
                words = ("submit", "--json", "--cluster", place, "--name", "job", *array, *train)
                found = json.loads(lab.call(user, *words))
                owner |= {str(number): user for number in found["jobs"]}
                say(f"{user} (weight {of_account[user]:g}): {_JOBS} jobs")
            began = time.time()
            while (left := began + 60 * minutes - time.time()) > 0:
                time.sleep(min(30.0, left))
                say(f"{time.time() - began:.0f} s\n{lab.call(users[0], 'limits').rstrip()}")
            ended = time.time()
            lab.call(users[0], "down")
            events = read_records(place / "events.jsonl")
    finally:
        shutil.rmtree(folder)
    return {
        "minutes": minutes,
        "jobs": _JOBS * len(users),
        "slots": _HOSTS * _SLOTS,
        **journal_figures(events, owner, of_account, (began, ended)),
        "most_slots_allowed": _MOST_SLOTS,
        "most_jobs_allowed": _MOST_JOBS,
    }


def journal_figures(
    events: Iterable[Mapping[str, Any]],
    owner: Mapping[str, str],
    weights: Mapping[str, float],
    between: tuple[float, float],
) -> dict[str, Any]:
    """Return what the journal of a daemon says of use and limits.

    Args:
        owner: user of each job.
        weights: weights of the users, all of whom have jobs that wait.
        between: the time in which use counts [Unix s].
    """
    holds: list[tuple[float, Counter[str]]] = [(0.0, Counter())]
    most_slots = most_jobs = 0
    for event in events:
        if event["kind"] != "jobs_decided":
            continue
        slots, jobs = Counter[str](), Counter[str]()
        for job, held in event["allocations"].items():
            slots[owner[str(job)]] += sum(held.values())
            jobs[owner[str(job)]] += 1
        holds.append((event["t"], slots))
        most_slots = max(most_slots, *slots.values(), 0)
        most_jobs = max(most_jobs, *jobs.values(), 0)
    used = _used(holds, between)
    whole, together = sum(used.values()), sum(weights.values())
    parts = {user: used.get(user, 0.0) / whole if whole else 0.0 for user in weights}
    worst = max(abs(parts[user] * together / weights[user] - 1) for user in weights)
    return {
        "weights": list(weights.values()),
        "used": [round(part, 4) for part in parts.values()],
        "worst": round(worst, 3),
        "changes": len(holds) - 1,
        "most_slots": most_slots,
        "most_jobs": most_jobs,
    }


def _used(
    holds: Sequence[tuple[float, Counter[str]]], between: tuple[float, float]
) -> dict[str, float]:
    """Return slots times seconds of each user in a time."""
    found: dict[str, float] = {}
    for (begin, slots), (end, _) in pairwise([*holds, (between[1], Counter())]):
        seconds = min(end, between[1]) - max(begin, between[0])
        for user, number in slots.items() if seconds > 0 else ():
            found[user] = found.get(user, 0.0) + number * seconds
    return found
