"""Check whether hosts are fit for a run, from the facts they report; pure functions.

FAILED means that a run cannot work, WARNING that it may have problems. Both say what to do.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hvd_elastic.control.hardware import judge_hardware
from hvd_elastic.formatting import bytes_words, count, duration_words, hosts_named, one_line
from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.programs.kill_run import OURS
from hvd_elastic.programs.look_at_host import HOROVOD_BUILD
from hvd_elastic.tools.check.network import NetLink, slow_links

REQUIRED = ("hvd_elastic", "horovod")
FRAMEWORKS = ("torch", "tensorflow")
COMPARED = (*REQUIRED, HOROVOD_BUILD, *FRAMEWORKS, "keras")
# A clock that differs by more than this from the leader's is a warning.
CLOCK_SKEW_S = 1.0
# Less free disk space or memory than LITTLE_… is a warning, less than NO_… a failure.
LITTLE_DISK_BYTES = 1 << 30
NO_DISK_BYTES = 100 << 20
LITTLE_MEMORY_BYTES = 1 << 30
# A lower limit of open files than FEW_FILES is a warning, than TOO_FEW_FILES a failure.
FEW_FILES = 1024
TOO_FEW_FILES = 256
# A GPU with more memory in use than this is busy; an idle one with a display uses less.
BUSY_GPU_MB = 1000.0
# Maximum number of names in one message.
NAMED = 3


class Level(Enum):
    """Severity of a check: a run works, may have problems, or cannot work."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """Result of one check; ``detail`` says what was found, and what to do unless it is OK."""

    name: str
    level: Level
    detail: str


@dataclass(frozen=True)
class HostHealth:
    """All checks of a host, and the facts that they are based on."""

    checks: tuple[Check, ...]
    facts: Mapping[str, Any]

    @property
    def level(self) -> Level:
        levels = [check.level for check in self.checks]
        for level in (Level.FAILED, Level.WARNING):
            if level in levels:
                return level
        return Level.OK


@dataclass(frozen=True)
class CheckSettings:
    """Settings of a check of a cluster.

    Attributes:
        python: Python interpreter that runs would use on the hosts; None for the leader's path.
        folders: folders that a run writes to, besides the home and the temporary folder.
        code: file or folder that must have the same Python files on every host.
        interface: network interface that the ring shall use; None for the one ssh connects to.
        network: whether to measure the network between the hosts.
        fanout: maximum number of hosts at a time.
        users: users who have jobs on each host of a cluster that is up; of other hosts it is not
            known who may use them.
    """

    python: str | None = None
    folders: tuple[str, ...] = ()
    code: str | None = None
    interface: str | None = None
    network: bool = True
    fanout: int = 64
    gpus: bool = True
    users: Mapping[str, Collection[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """Values that the hosts are compared with.

    Attributes:
        python: Python version.
        packages: versions by package; None if neither the leader nor most hosts have it.
        cuda, driver, mtu, interface: most common values of the hosts; None if there is none.
        code, package_code: digests by file name; None if there is nothing to compare.
        gpus: whether most hosts have GPUs.
        known_names: whether hosts know one another by the names in the hostfile.
        whose: for each package "the leader has" or "the others have".
    """

    python: str
    packages: Mapping[str, str | None]
    cuda: str | None
    driver: str | None
    mtu: int | None
    interface: str | None
    code: Mapping[str, str] | None
    package_code: Mapping[str, str] | None
    gpus: bool
    known_names: bool
    whose: Mapping[str, str]


def choose_reference(
    leader: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]], settings: CheckSettings
) -> Reference:
    """Return the leader's versions, or where it has none, what most hosts have.

    Args:
        leader: "python", "packages", "code" and "package_code" of this machine.
        facts: answer of ``programs/look_at_host.py`` by host.
    """
    whose = {}
    packages = {}
    for package, version in leader["packages"].items():
        there = [each["packages"].get(package) for each in facts.values()]
        usual = _commonest(there) if 2 * there.count(None) <= len(there) else None
        packages[package] = version or usual
        whose[package] = "the leader has" if version else "the others have"
    known = [
        bool(addresses)
        for name, each in facts.items()
        for other, addresses in each["resolved"].items()
        if other != name
    ]
    return Reference(
        leader["python"],
        packages,
        _commonest(each["cuda"] for each in facts.values()),
        _commonest(driver for each in facts.values() for driver in _drivers(each)),
        _commonest(_mtu(each, settings) for each in facts.values()),
        _commonest(_interface(each, settings) for each in facts.values()),
        leader["code"],
        leader["package_code"],
        2 * sum(bool(each["gpus"]) for each in facts.values()) > len(facts),
        2 * sum(known) >= len(known),
        whose,
    )


def check_host(
    host: Host, facts: Mapping[str, Any], reference: Reference, settings: CheckSettings
) -> list[Check]:
    """Return the checks of the facts that one host reported.

    Args:
        host: the host, as in the hostfile.
        facts: answer of ``programs/look_at_host.py``.
        reference: values that it is compared with.
    """
    checks = [_check_python(facts, reference)]
    for package, version in reference.packages.items():
        if version is not None or package in REQUIRED:
            there = facts["packages"].get(package)
            checks.append(_check_package(package, there, version, reference))
    if not any(facts["packages"].get(package) for package in FRAMEWORKS):
        text = "neither PyTorch nor TensorFlow is installed there. Install one of them everywhere"
        checks.append(Check("framework", Level.FAILED, text))
    checks.append(_check_cuda(facts["cuda"], reference.cuda))
    if settings.gpus and (facts["gpus"] or facts["gpu_error"]):
        checks += _check_gpus(host, facts, reference)
    elif settings.gpus and reference.gpus:
        text = "none: there is no nvidia-smi, and most hosts have GPUs. Install the driver there"
        checks.append(Check("gpus", Level.FAILED, f"{text}, or leave the host out"))
    code = settings.code
    checks.append(
        _compare_code(
            "code",
            facts["code"],
            None if code is None else reference.code,
            f"{code} is not there",
            f"Copy it: copyclust HOSTFILE {code} {code}",
        )
    )
    checks.append(
        _compare_code(
            "hvd_elastic code",
            facts["package_code"],
            None if facts["package_code"] is None else reference.package_code,
            "hvd_elastic is not there",
            "Install the same everywhere",
        )
    )
    checks += [_check_folder(folder, found) for folder, found in facts["folders"].items()]
    checks += [_check_memory(facts["memory"]), _check_files(facts["nofile"])]
    if facts["infiniband"]:
        checks.append(_check_memlock(facts["memlock"]))
    checks.append(_check_interface(facts, reference, settings))
    checks.append(_check_mtu(facts, reference, settings))
    checks.append(_check_own_name(facts))
    checks.append(_check_cpus(host, facts["cpus"]))
    return checks


def check_names(
    name: str, facts: Mapping[str, Mapping[str, Any]], reference: Reference
) -> list[Check]:
    """Check whether a host can look up the names of the others, with the right addresses.

    Args:
        name: name of the host.
        facts: facts of all hosts.
        reference: says whether host names are known in this cluster at all.
    """
    if not reference.known_names:
        return []
    unknown, wrong = [], []
    for other, addresses in facts[name]["resolved"].items():
        if other == name:
            continue
        if not addresses:
            unknown.append(other)
        elif other in facts:
            own = {a for entry in facts[other]["interfaces"].values() for a in entry["addresses"]}
            if own and not own & set(addresses):
                wrong.append(f"{other} as {addresses[0]}")
    if wrong:
        text = f"knows {', '.join(wrong[:NAMED])}, which is not its address. Fix /etc/hosts or DNS"
        return [Check("names", Level.WARNING, text)]
    if unknown:
        text = (
            f"does not know {hosts_named(unknown)} by name, as horovodrun and mpirun need it. Fix "
            "/etc/hosts or DNS there"
        )
        return [Check("names", Level.WARNING, text)]
    return [Check("names", Level.OK, "knows the others by name")]


def check_clock(skew_s: float, doubt_s: float) -> Check:
    """Return the check of a clock that differs by ``skew_s``, measured to within ``doubt_s``."""
    text = f"{skew_s:+.3f} s ± {doubt_s:.3f} s"
    if abs(skew_s) - doubt_s > CLOCK_SKEW_S:
        return Check("clock", Level.WARNING, f"{text} from the leader's. Start NTP there")
    return Check("clock", Level.OK, text)


def check_strays(processes: Sequence[Mapping[str, Any]]) -> Check:
    """Return the check for processes that crashed runs left behind.

    Args:
        processes: each with "pid", "command", and "run": launcher and job.
    """
    if not processes:
        return Check("strays", Level.OK, "none")
    shown = [f"{each['pid']} ({each['run']})" for each in processes[:NAMED]]
    more = f" and {len(processes) - NAMED} more" if len(processes) > NAMED else ""
    jobs = dict.fromkeys(str(each["run"]).partition(" ")[::2] for each in processes)
    ends = dict.fromkeys(
        f"killclust HOSTFILE --run {job}" if launcher == OURS else "killclust HOSTFILE --strays"
        for launcher, job in jobs
    )
    text = f"{count(len(processes), 'process')} of dead runs: {', '.join(shown)}{more}"
    return Check("strays", Level.WARNING, f"{text}. End with: {'; '.join(ends)}")


def check_users(processes: Sequence[Mapping[str, Any]], users: Collection[str]) -> Check:
    """Return the check for users who use a host of a cluster without a job there.

    Args:
        processes: as of :class:`~hvd_elastic.programs.busy.BusyProcesses`.
        users: those who have jobs on the host.
    """
    strangers: dict[str, list[str]] = {}
    for each in processes:
        if each["user"] not in users:
            # A process may name itself so that a terminal obeys it.
            told = f"{one_line(str(each['command']))} (pid {each['pid']}, {each['uses']})"
            strangers.setdefault(str(each["user"]), []).append(told)
    if not strangers:
        return Check("users", Level.OK, "all who use it have jobs there")
    found = [
        f"{user} has no job here and runs {', '.join(told[:NAMED])}"
        + (f" and {len(told) - NAMED} more" if len(told) > NAMED else "")
        for user, told in strangers.items()
    ]
    return Check(
        "users", Level.WARNING, f"{'; '.join(found)}. Who has which jobs: hvd-elastic queue"
    )


def check_network(names: Sequence[str], links: Sequence[NetLink]) -> dict[str, list[Check]]:
    """Return the checks of the network, each for the host that is the likely cause.

    Args:
        names: hosts that were measured.
        links: results of :class:`hvd_elastic.tools.check.network.NetworkProbe`.

    Returns:
        Checks named ``ports`` and ``network``, by host.
    """
    found: dict[str, list[Check]] = {name: [] for name in names}
    refused = [link for link in links if link.refused]
    for name, reasons, whole in _by_host(refused, names):
        far = (
            f"nobody can connect to it ({reasons[0].refused})"
            if whole
            else "; ".join(
                f"cannot connect to {link.target} ({link.refused})" for link in reasons[:NAMED]
            )
        )
        text = f"{far}. Let hosts connect to one another on all TCP ports (firewall, routes)"
        found[name].append(Check("ports", Level.FAILED, text))
    slow = slow_links(links)
    good = [link for link in links if not link.refused]
    usual = _speed(good) if good else ""
    for name, some, whole in _by_host(slow, names):
        far = (
            f"its link carries {_speed(some)}"
            if whole
            else "; ".join(f"to {link.target} {_speed([link])}" for link in some[:NAMED])
        )
        text = f"{far}, elsewhere it is {usual}. Look at cable, port and duplex there"
        found[name].append(Check("network", Level.WARNING, text))
    for name, checks in found.items():
        here = {check.name for check in checks}
        if len(names) > 1 and "ports" not in here:
            checks.append(Check("ports", Level.OK, "reaches the others"))
        own = [link for link in good if link.source == name]
        if own and "network" not in here:
            checks.append(Check("network", Level.OK, _speed(own)))
    return found


def _by_host(
    links: Sequence[NetLink], names: Sequence[str]
) -> Iterable[tuple[str, list[NetLink], bool]]:
    """Group bad links by host.

    Yields:
        Host, links, and whether the host itself is the likely cause, because its links to most
        other hosts are bad.
    """
    left = list(links)
    others = len(names) - 1
    for name in names:
        touched = [link for link in left if name in (link.source, link.target)]
        partners = {link.target if link.source == name else link.source for link in touched}
        if others >= 2 and 2 * len(partners) > others and len(partners) > 1:
            left = [link for link in left if link not in touched]
            yield name, touched, True
    for name in names:
        own = [link for link in left if link.source == name]
        if own:
            yield name, own, False


def _speed(links: Sequence[NetLink]) -> str:
    rate = statistics.median([link.bytes_per_s for link in links]) * 8 / 1e6
    latency_s = statistics.median([link.latency_s for link in links])
    speed = f"{rate:.0f} Mbit/s" if rate < 9950 else f"{rate / 1e3:.0f} Gbit/s"
    return f"{speed}, {duration_words(latency_s)} there and back"


def _commonest(values: Iterable[Hashable | None]) -> Any:
    counts = Counter(value for value in values if value is not None)
    return counts.most_common(1)[0][0] if counts else None


def _check_python(facts: Mapping[str, Any], reference: Reference) -> Check:
    there, here = str(facts["python"]), reference.python
    if there.split(".")[:2] != here.split(".")[:2]:
        return Check(
            "python",
            Level.FAILED,
            f"{there} ({facts['executable']}), the leader has {here}. Install Python "
            f"{'.'.join(here.split('.')[:2])} there, or name it with --python",
        )
    return Check("python", Level.OK, f"{there} ({facts['executable']})")


def _check_package(
    package: str, there: str | None, wanted: str | None, reference: Reference
) -> Check:
    whose = f"{reference.whose.get(package, 'the others have')} {wanted}"
    if there is None:
        why = f"not installed there, {whose}" if wanted else "not installed there"
        how = "'hvd-elastic install HOSTFILE' brings" if package in REQUIRED else "Install"
        if package == HOROVOD_BUILD:
            how = "Run 'hvd-elastic build-horovod' there, for"
        return Check(package, Level.FAILED, f"{why}. {how} the same version everywhere")
    if there.startswith("broken"):
        return Check(package, Level.FAILED, f"{there}. Install it again there")
    if wanted and there != wanted and "unknown" not in (there, wanted):
        return Check(
            package, Level.FAILED, f"{there}, {whose}. Install the same version everywhere"
        )
    return Check(package, Level.OK, there)


def _check_cuda(there: str | None, usual: str | None) -> Check:
    if usual is not None and there != usual:
        text = f"{there or 'none'}, the others have {usual}. "
        return Check("cuda", Level.FAILED, f"{text}Install the same PyTorch build everywhere")
    return Check("cuda", Level.OK, there or "none")


def check_hardware(found: Mapping[str, Any], *, gpus: bool = True) -> list[Check]:
    """Return what is wrong with the hardware of a host; "hardware" is OK if nothing is.

    Args:
        found: answer of ``programs/hardware.py``.
        gpus: whether the GPUs matter.
    """
    checks = [
        Check(
            "gpu hardware" if fault.is_gpu else "hardware",
            Level.FAILED if fault.is_broken else Level.WARNING,
            fault.text,
        )
        for fault in judge_hardware(found)
        if gpus or not fault.is_gpu
    ]
    if not checks:
        unknown = "" if found["xids"] is not None else "; the kernel's log cannot be read"
        checks.append(Check("hardware", Level.OK, f"no faults known{unknown}"))
    return checks


def _drivers(facts: Mapping[str, Any]) -> set[str]:
    return {str(gpu["driver_version"]) for gpu in facts["gpus"]}


def _check_gpus(host: Host, facts: Mapping[str, Any], reference: Reference) -> list[Check]:
    if facts["gpu_error"]:
        text = (
            f"{facts['gpu_error']}. Look at nvidia-smi and dmesg there; a reboot may bring it back"
        )
        return [Check("gpus", Level.FAILED, text)]
    gpus, checks = facts["gpus"], []
    if len(gpus) < host.slots:
        text = (
            f"{count(len(gpus), 'GPU')} for {count(host.slots, 'slot')}. Lower slots=, or look for "
            "the one that fell off (dmesg); --no-gpus if the job trains on processors"
        )
        checks.append(Check("gpus", Level.FAILED, text))
    busy = [gpu["index"] for gpu in gpus if _number(gpu["memory.used"]) > BUSY_GPU_MB]
    if busy:
        text = f"in use: GPU {', '.join(busy)}. See nvidia-smi there; killclust ends strays"
        checks.append(Check("gpus", Level.WARNING, text))
    driver = " ".join(sorted(_drivers(facts)))
    if not checks:
        checks.append(Check("gpus", Level.OK, f"{len(gpus)}, driver {driver}"))
    if reference.driver is not None and driver != reference.driver:
        text = f"{driver}, the others have {reference.driver}. Use the same everywhere"
        checks.append(Check("driver", Level.WARNING, text))
    return checks


def _number(text: str) -> float:
    """Return a number that nvidia-smi printed; 0 for ``[N/A]``."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _compare_code(
    name: str,
    there: Mapping[str, str] | None,
    here: Mapping[str, str] | None,
    missing: str,
    remedy: str,
) -> Check:
    if here is None:
        return Check(name, Level.OK, "not compared")
    if there is None:
        return Check(name, Level.FAILED, f"{missing}. {remedy}")
    differ = sorted(file for file in {*there, *here} if there.get(file) != here.get(file))
    if differ:
        text = f"{count(len(differ), 'file')} of other content than the leader's"
        return Check(name, Level.FAILED, f"{text} ({', '.join(differ[:NAMED])}). {remedy}")
    return Check(name, Level.OK, f"{count(len(here), 'file')} as on the leader")


def _check_folder(folder: str, found: Mapping[str, Any]) -> Check:
    name = f"folder {folder}"
    free = found["free"]
    text = "free space unknown" if free is None else f"{bytes_words(free)} free"
    if free is not None and free < NO_DISK_BYTES:
        return Check(name, Level.FAILED, f"{text}. Make room")
    if found["refused"]:
        why = f"nothing can be written there ({found['refused']})"
        return Check(name, Level.FAILED, f"{why}. Fix its owner, mode or mount")
    if free is not None and free < LITTLE_DISK_BYTES:
        text = f"{text}, little for checkpoints and logs. Make room"
        return Check(name, Level.WARNING, text)
    return Check(name, Level.OK, text)


def _check_memory(memory: Mapping[str, int]) -> Check:
    text = f"{bytes_words(memory['available'])} of {bytes_words(memory['total'])} can be had"
    if memory["available"] < LITTLE_MEMORY_BYTES:
        return Check("memory", Level.WARNING, f"{text}. End what uses it")
    return Check("memory", Level.OK, text)


def _check_files(limit: int) -> Check:
    if 0 <= limit < FEW_FILES:
        text = f"{limit} open files to a process. Raise it to {FEW_FILES} or more: nofile in "
        level = Level.FAILED if limit < TOO_FEW_FILES else Level.WARNING
        return Check("open files", level, f"{text}/etc/security/limits.conf there")
    return Check("open files", Level.OK, "no limit" if limit < 0 else str(limit))


def _check_memlock(limit: int) -> Check:
    if limit >= 0:
        text = f"{limit // 1024} kB, and InfiniBand needs it without limit. memlock in "
        return Check("locked memory", Level.WARNING, f"{text}/etc/security/limits.conf there")
    return Check("locked memory", Level.OK, "no limit")


def _interface(facts: Mapping[str, Any], settings: CheckSettings) -> str | None:
    """Return the interface that the ring would use."""
    if settings.interface is not None:
        return settings.interface if settings.interface in facts["interfaces"] else None
    for name, entry in facts["interfaces"].items():
        if facts["address"] in entry["addresses"]:
            return str(name)
    return None


def _mtu(facts: Mapping[str, Any], settings: CheckSettings) -> int | None:
    entry = facts["interfaces"].get(_interface(facts, settings))
    return None if entry is None else entry["mtu"]


def _check_interface(
    facts: Mapping[str, Any], reference: Reference, settings: CheckSettings
) -> Check:
    name = "interface"
    there = {
        each: entry["addresses"]
        for each, entry in facts["interfaces"].items()
        if entry["addresses"] and each != "lo"
    }
    known = ", ".join(f"{each} {addresses[0]}" for each, addresses in there.items()) or "none"
    own = _interface(facts, settings)
    if settings.interface is not None:
        entry = facts["interfaces"].get(settings.interface)
        if entry is None or not entry["up"] or not entry["addresses"]:
            what = (
                "not there" if entry is None else "down" if not entry["up"] else "without address"
            )
            text = f"{settings.interface} is {what} (it has {known}). Fix it, or name another"
            return Check(name, Level.FAILED, f"{text} with --network-interface")
    elif own is not None and reference.interface is not None and own != reference.interface:
        text = f"{own}, the others use {reference.interface} (it has {known}). NCCL and horovodrun "
        return Check(name, Level.WARNING, f"{text}need one name on all hosts; use the same network")
    return Check(name, Level.OK, own or "this machine")


def _check_mtu(facts: Mapping[str, Any], reference: Reference, settings: CheckSettings) -> Check:
    own = _mtu(facts, settings)
    if own is not None and reference.mtu is not None and own != reference.mtu:
        text = f"{own}, the others have {reference.mtu}. Large packets will be lost; set it alike"
        return Check("mtu", Level.WARNING, text)
    return Check("mtu", Level.OK, str(own or "-"))


def _check_own_name(facts: Mapping[str, Any]) -> Check:
    name = "own name"
    if not facts["own_addresses"]:
        text = f"does not know its own name {facts['name']!r}, as Gloo and MPI may need it. "
        remedy = f"Add the line '{facts['address'] or '127.0.1.1'} {facts['name']}' to /etc/hosts"
        return Check(name, Level.WARNING, f"{text}{remedy} there")
    return Check(name, Level.OK, str(facts["name"]))


def _check_cpus(host: Host, cpus: int) -> Check:
    text = f"{cpus} for {count(host.slots, 'slot')}"
    if cpus < host.slots:
        return Check("cpus", Level.WARNING, f"{text}. Lower slots= if it is slow")
    return Check("cpus", Level.OK, text)
