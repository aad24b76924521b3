"""Assign the files of a shared store to the hosts that fetch them, also after failures; no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

# If two hosts cannot fetch a file, it is missing in the store or the command is wrong.
MOST_TRIES = 2


class Shares:
    """Records which host fetches which files; files are known by their numbers.

    Args:
        count: number of files.

    Attributes:
        owners: host that has fetched a file or had it before, by file.
        failures: reason why the command failed, by host.
        lost: reason why a file cannot be fetched, by file.
    """

    def __init__(self, count: int) -> None:
        self.owners: dict[int, str] = {}
        self.failures: dict[str, str] = {}
        self.lost: dict[int, str] = {}
        self._count = count
        self._tries: Counter[int] = Counter()
        self._asked: dict[str, set[int]] = {}

    def assign_all(self, hosts: Sequence[str]) -> dict[str, list[int]]:
        """Assign the files without an owner: each of n hosts fetches every n-th file.

        The same numbers go to the same hosts in each copy.

        >>> shares = Shares(5)
        >>> shares.owners[2] = "b"
        >>> shares.assign_all(["a", "b"])
        {'a': [0, 4], 'b': [1, 3]}
        """
        orders: dict[str, list[int]] = {}
        for index in range(self._count):
            if index not in self.owners:
                orders.setdefault(hosts[index % len(hosts)], []).append(index)
        return self._ask(orders)

    def hear(
        self, host: str, came: Iterable[int], failed: Sequence[int], why: str, hosts: Sequence[str]
    ) -> dict[str, list[int]]:
        """Record what a host has fetched and reassign what it could not fetch.

        Args:
            came: files that it has fetched.
            failed: files that it could not fetch.
            why: reason of the failure.
            hosts: hosts that can fetch the failed files.

        Returns:
            The files that each host shall fetch now.
        """
        self.owners.update(dict.fromkeys(came, host))
        self._asked.get(host, set()).difference_update(came, failed)
        if not failed:
            return {}
        self.failures.setdefault(host, why)
        again = []
        for index in failed:
            self._tries[index] += 1
            if self._tries[index] < MOST_TRIES and hosts != [host]:
                again.append(index)
            else:
                self.lost[index] = why
        return self._give(again, [other for other in hosts if other != host])

    def lose(self, host: str, hosts: Sequence[str]) -> dict[str, list[int]]:
        """Record that a host is gone and reassign the files that it had and was to fetch.

        Returns:
            The files that each of ``hosts`` shall fetch now.
        """
        files = self._asked.pop(host, set()) | self.disown(host)
        if not hosts:
            self.lost.update(dict.fromkeys(files, f"host {host}, which fetched it, was lost"))
            return {}
        return self._give(sorted(files), hosts)

    def disown(self, host: str) -> set[int]:
        """Remove a host as the owner of its files; return the files."""
        files = {index for index, owner in self.owners.items() if owner == host}
        for index in files:
            del self.owners[index]
        return files

    @property
    def finished(self) -> bool:
        """Return whether no host is fetching anything."""
        return not any(self._asked.values())

    def _give(self, files: Sequence[int], hosts: Sequence[str]) -> dict[str, list[int]]:
        """Distribute files over the hosts whose command has not failed, or else over all."""
        well = [host for host in hosts if host not in self.failures] or list(hosts)
        orders: dict[str, list[int]] = {}
        for number, index in enumerate(files):
            orders.setdefault(well[number % len(well)], []).append(index)
        return self._ask(orders)

    def _ask(self, orders: dict[str, list[int]]) -> dict[str, list[int]]:
        for host, files in orders.items():
            self._asked.setdefault(host, set()).update(files)
        return orders
