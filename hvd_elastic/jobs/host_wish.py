"""Which hosts of a cluster a job asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hvd_elastic.errors import HostfileError, RunError, UsageError
from hvd_elastic.formatting import count, hosts_named
from hvd_elastic.hosts.hostfile import Host, Hostfile, is_named


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a host, as it says itself.

    Attributes:
        memory_gb: memory of each [GB, 1e9 bytes].
        names: name of each.
    """

    memory_gb: tuple[float, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def words(self) -> set[str]:
        """Words of their names, which count as labels.

        >>> sorted(Gpus(names=("NVIDIA A100-SXM4-40GB",)).words)
        ['40gb', 'a100', 'nvidia', 'sxm4']
        """
        return {word for name in self.names for word in re.findall("[a-z0-9]+", name.lower())}


@dataclass(frozen=True)
class HostWish:
    """Which hosts a job may have: all that fulfil each of these; without any all hosts.

    Attributes:
        only: list of names such as ``gpu[1-4]``, and of labels such as ``@a100``; empty: all.
        exclude: such a list of hosts that it may not have.
        labels: what a host has, all of them: labels of the hostfile or, if no host there has it,
            words of the names of its GPUs.
        gpu_memory_gb: least memory of each of its GPUs [GB, 1e9 bytes]; None: it may have none.
    """

    only: str = ""
    exclude: str = ""
    labels: tuple[str, ...] = ()
    gpu_memory_gb: float | None = None

    @property
    def words(self) -> str:
        """The options that ask for it.

        >>> HostWish("gpu[1-4],@a100", gpu_memory_gb=40.0).words
        '--hosts gpu[1-4],@a100 --gpu-memory 40'
        """
        memory = "" if self.gpu_memory_gb is None else f"{self.gpu_memory_gb:g}"
        values = {
            "--hosts": self.only,
            "--exclude": self.exclude,
            "--labels": ",".join(self.labels),
            "--gpu-memory": memory,
        }
        return " ".join(f"{flag} {value}" for flag, value in values.items() if value)

    def asks_gpus(self, hosts: Mapping[str, Host]) -> bool:
        """Return whether what is asked depends on the GPUs of hosts, beside their labels."""
        return self.gpu_memory_gb is not None or not _labels(hosts).issuperset(self.labels)

    def allowed(self, hosts: Mapping[str, Host], gpus: Mapping[str, Gpus]) -> frozenset[str] | None:
        """Return the hosts that may be had; None: all, those of the future too.

        Args:
            gpus: GPUs of hosts, as far as they are known.
        """
        if self == HostWish():
            return None
        listed = _labels(hosts) if self.labels else set()
        return frozenset(
            host.name
            for host in hosts.values()
            if (not self.only or is_named(host, self.only))
            and not (self.exclude and is_named(host, self.exclude))
            and all(
                label in host.labels
                if label in listed
                else label.lower() in _gpus_of(host, gpus).words
                for label in self.labels
            )
            and (self.gpu_memory_gb is None or _least_memory(host, gpus) >= self.gpu_memory_gb)
        )

    def refuse_impossible(
        self,
        hosts: Mapping[str, Host],
        gpus: Mapping[str, Gpus],
        least: int,
        whose: tuple[str, str],
    ) -> None:
        """Raise RunError if the hosts can never give a job what it asks for.

        Args:
            hosts: hosts of the cluster.
            least: fewest slots of the job.
            whose: the job and the cluster, in words.
        """
        job, cluster = whose
        hostfile = Hostfile((*hosts.values(),), cluster)
        for flag, text in (("--hosts", self.only), ("--exclude", self.exclude)):
            try:
                if text:
                    hostfile.choose(text)
            except HostfileError as error:
                raise UsageError(f"{flag}: {error}") from None
        for label in self.labels:
            if not HostWish(labels=(label,)).allowed(hosts, gpus):
                labels = sorted(_labels(hosts))
                models = sorted({name for each in gpus.values() for name in each.names})
                has = f"its labels are {', '.join(labels)}" if labels else "it has no labels="
                has += f", its GPUs are {', '.join(models)}" if models else ""
                raise UsageError(f"--labels: no host of {cluster} has the label '{label}'; {has}")
        unknown = hosts.keys() - gpus.keys()
        may_have = {**gpus, **dict.fromkeys(unknown, Gpus((float("inf"),)))}
        allowed = self.allowed(hosts, may_have)
        able = hosts.keys() if allowed is None else allowed
        slots = sum(hosts[name].slots for name in able)
        if slots >= least:
            return
        if not able:
            names = replace(self, labels=(), gpu_memory_gb=None).allowed(hosts, {})
            named = [host for host in hosts.values() if names is None or host.name in names]
            has = "; ".join(_has(host, gpus, self) for host in named[:_MOST_TOLD])
            more = "; …" if len(named) > _MOST_TOLD else ""
            raise RunError(
                f"no host of {cluster} is as {job} asks ({self.words}): {has or 'all are excluded'}"
                + more
            )
        if allowed is None:
            raise RunError(
                f"{job} needs {count(least, 'slot')}, and {cluster} has {slots} on "
                f"{count(len(hosts), 'host')}. Lower --min-np or --np, or add hosts to its "
                "hostfile first."
            )
        raise RunError(
            f"{job} needs {count(least, 'slot')}, and {hosts_named(sorted(able))} of {cluster}, "
            f"which it asks for ({self.words}), {'has' if len(able) == 1 else 'have'} {slots}. "
            "Lower --min-np or --np, or ask for more hosts."
        )


_MOST_TOLD = 8
"""Hosts of which it is told what they have."""


def _labels(hosts: Mapping[str, Host]) -> set[str]:
    return {label for host in hosts.values() for label in host.labels}


def _gpus_of(host: Host, gpus: Mapping[str, Gpus]) -> Gpus:
    return gpus.get(host.name, Gpus())


def _least_memory(host: Host, gpus: Mapping[str, Gpus]) -> float:
    """Return the memory of the smallest GPU that slots of a host use [GB]; 0 without one."""
    every = _gpus_of(host, gpus).memory_gb
    used = [every[number] for number in host.devices if number < len(every)]
    return min(used or every, default=0.0)


def _has(host: Host, gpus: Mapping[str, Gpus], wish: HostWish) -> str:
    """Return what a host has of that which a job asks for."""
    has = [f"labels {','.join(host.labels)}" if host.labels else "no labels"] if wish.labels else []
    if wish.gpu_memory_gb is not None:
        least = _least_memory(host, gpus)
        known = "" if host.name in gpus else " that is known"
        has.append(f"GPUs of {least:.3g} GB" if least else f"no GPU{known}")
    return f"{host.name} has {' and '.join(has)}" if has else host.name
