"""Which host fetches which files from a shared store, and who does where one cannot; no IO."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# A file that two hosts cannot fetch is missing in the store, or the command is wrong.
MOST_TRIES = 2


class Shares:
    """Files by number, each fetched by one host.

    Args:
        count: how many files there are.

    Attributes:
        owners: who has a file from the store, or had it before.
        failures: why the command failed, by host.
        lost: why a file does not come, by number.
    """

    def __init__(self, count: int) -> None:
        self.owners: dict[int, str] = {}
        self.failures: dict[str, str] = {}
        self.lost: dict[int, str] = {}
        self._count = count
        self._tries: dict[int, int] = {}
        self._asked: dict[str, set[int]] = {}

    def begin(self, hosts: Sequence[str]) -> dict[str, list[int]]:
        """What each host fetches of what has no owner: every n-th file, the same in each call.

        >>> shares = Shares(5)
        >>> shares.owners[2] = "b"
        >>> shares.begin(["a", "b"])
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
        """A host has done some of what it was asked for.

        Args:
            host: which.
            came: files that it has now.
            failed: those it could not fetch.
            why: the reason.
            hosts: who could fetch them.

        Returns:
            Who shall fetch them now.
        """
        self.owners.update(dict.fromkeys(came, host))
        self._asked.get(host, set()).difference_update(came, failed)
        if not failed:
            return {}
        self.failures.setdefault(host, why)
        again = []
        for index in failed:
            self._tries[index] = self._tries.get(index, 0) + 1
            if self._tries[index] < MOST_TRIES and hosts != [host]:
                again.append(index)
            else:
                self.lost[index] = why
        return self._give(again, [other for other in hosts if other != host])

    def lose(self, host: str, hosts: Sequence[str]) -> dict[str, list[int]]:
        """A host is gone, with all that it had and was asked for.

        Returns:
            Who of ``hosts`` shall fetch that.
        """
        files = self._asked.pop(host, set()) | self.disown(host)
        if not hosts:
            self.lost.update(dict.fromkeys(files, f"host {host}, which fetched it, was lost"))
            return {}
        return self._give(sorted(files), hosts)

    def disown(self, host: str) -> set[int]:
        """Forgets what a host had; returns the files."""
        files = {index for index, owner in self.owners.items() if owner == host}
        for index in files:
            del self.owners[index]
        return files

    @property
    def finished(self) -> bool:
        """Whether nothing is being fetched."""
        return not any(self._asked.values())

    def _give(self, files: Sequence[int], hosts: Sequence[str]) -> dict[str, list[int]]:
        """Spreads files over the hosts, those first whose command has not failed."""
        well = [host for host in hosts if host not in self.failures] or list(hosts)
        orders: dict[str, list[int]] = {}
        for number, index in enumerate(files):
            orders.setdefault(well[number % len(well)], []).append(index)
        return self._ask(orders)

    def _ask(self, orders: dict[str, list[int]]) -> dict[str, list[int]]:
        for host, files in orders.items():
            self._asked.setdefault(host, set()).update(files)
        return orders
