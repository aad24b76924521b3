"""Bring this environment to hosts that have no shared disk (``hvd-elastic install``).

The environment is copied as ``copyclust`` does, to a folder beside its place on every host, with
this package in it. It gets its name only where it has passed the checks of ``checkclust`` that
concern it, and imports. A host whose environment is in use is not changed.
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

import hvd_elastic
from hvd_elastic.errors import SshError, UsageError
from hvd_elastic.hosts.connection import Connection, SshOptions
from hvd_elastic.hosts.fanout import DEFAULT_FANOUT, HostResult, Outcome, Stopper, fan_out
from hvd_elastic.hosts.hostfile import Host, fold_hosts
from hvd_elastic.hosts.remote_python import FROM_NO_WORKING_FOLDER, run_script
from hvd_elastic.hosts.ssh import connect
from hvd_elastic.install.horovod_wheel import has_library
from hvd_elastic.programs.environment import STAMP, identity, libc, new_name
from hvd_elastic.tools.check.checks import (
    COMPARED,
    FRAMEWORKS,
    CheckSettings,
    Level,
    check_host,
    choose_reference,
)
from hvd_elastic.tools.check.health import leader_facts
from hvd_elastic.tools.copy.copying import Copied, CopyProgress, CopySettings, copy_to_hosts

# Limit for each step on a host but the copy; an import from a slow disk takes minutes.
STEP_S = 600.0
# Python compiles for itself; what is left of a removed package would keep it importable.
COMPILED = "__pycache__"
# The stamp tells what a copy has installed.
LEFT_OUT = (COMPILED, STAMP)
CHECKED = ("python", *COMPARED, "framework", "hvd_elastic code")
_OF_ITS_OWN = ", and compiled packages do not work there. Run `make horovod` on it instead"


@dataclass(frozen=True)
class Environment:
    """The environment that is installed.

    Attributes:
        prefix: its folder, here and on every host.
        base: the Python that it was made by, which every host needs at the same path; None if the
            environment has it itself, as those of conda have.
        package: folder of this package if it is outside, as that of a checkout.
        site: folder of packages, relative to ``prefix``.
    """

    prefix: str
    base: Path | None
    package: Path | None
    site: Path


@dataclass(frozen=True)
class Installed:
    """Result on one host; in a dry run, the result that it would have.

    Attributes:
        environment: ``installed``, ``up to date``, or ``shared``: it is the same folder as here.
        files, size_bytes, removed: files sent, their size [bytes], and entries removed.
        note: what failed although the environment is whole.
    """

    environment: str
    files: int = 0
    size_bytes: int = 0
    removed: int = 0
    note: str = ""


def own_environment() -> Environment:
    """Return the environment of this process.

    Raises:
        UsageError: it is no environment that can be copied.
    """
    prefix = Path(sys.prefix)
    is_conda = (prefix / "conda-meta").is_dir()
    if (prefix / "condabin").is_dir() or (sys.prefix == sys.base_prefix and not is_conda):
        whose = "conda's base environment" if is_conda else "the Python of this system"
        raise UsageError(
            f"hvd_elastic is installed in {whose} ({prefix}), which is not copied to hosts. "
            "Install it in an environment of its own: `make horovod` makes one (docs/install.md)"
        )
    package = Path(hvd_elastic.__file__).resolve().parent
    site = Path(sysconfig.get_path("purelib")).relative_to(prefix)
    is_inside = package.is_relative_to(prefix.resolve())
    base = None if is_conda else _base_python(prefix)
    return Environment(sys.prefix, base, None if is_inside else package, site)


def _base_python(prefix: Path) -> Path:
    """Return the first path outside of the environment to which its ``bin/python`` leads."""
    python = prefix / "bin" / "python"
    while python.is_symlink() and python.is_relative_to(prefix):
        python = python.parent / python.readlink()
    if python.is_relative_to(prefix):  # made with --copies
        version = sys.version_info
        return Path(sys.base_prefix, "bin", f"python{version.major}.{version.minor}")
    return python


@dataclass
class Installation:
    """One installation on many hosts.

    Attributes:
        environment: what is installed.
        dry_run: only find out what would be done.
        fanout: maximum number of hosts at a time.
        wheel: folder of the kept Horovod wheel, which is copied too.
        on_step: called with the name of each step before it begins.
        on_progress: called with the progress of a copy.
    """

    hosts: Sequence[Host]
    environment: Environment
    options: SshOptions
    dry_run: bool = False
    fanout: int = DEFAULT_FANOUT
    wheel: Path | None = None
    on_step: Callable[[str], None] = lambda _: None
    on_progress: Callable[[CopyProgress], None] | None = None
    _failed: dict[str, HostResult[Any]] = field(default_factory=dict, init=False)
    _started: float = field(default_factory=time.monotonic, init=False)

    def run(self) -> Iterator[HostResult[Installed]]:
        """Yield one result for each host.

        After an interruption another call continues. If the environment of one host is in use and
        would change, no host is changed: a run must not meet another version on its next host.
        """
        base, own_identity = self.environment.base, identity(self.environment.prefix)
        looked = self._each(
            self.hosts,
            "looking",
            lambda connection: _act(
                connection,
                "look",
                prefix=self.environment.prefix,
                base=base and str(base),
                own_identity=own_identity,
            ),
            lambda facts: why_not(facts, self.environment),
        )
        shared = [host for host in self._well(self.hosts) if looked[host.name]["shared"]]
        apart = [host for host in self._well(self.hosts) if host not in shared]
        present = [host for host in apart if looked[host.name]["exists"]]
        found = self._copy(present, self.environment.prefix, dry_run=True)
        same = [
            host
            for host in self._well(present)
            if not (found[host.name].files or found[host.name].touched or found[host.name].removed)
        ]
        changing = [host for host in self._well(apart) if host not in same]
        for name, why in why_kept({host.name: looked[host.name] for host in changing}).items():
            self._fail(name, why)
        changing = self._well(changing)
        if self.dry_run:
            absent = [host for host in changing if host not in present]
            found |= self._copy(absent, new_name(self.environment.prefix), dry_run=True)
        else:
            self._each([*shared, *same], "checking", self._check(self.environment.prefix))
            found |= self._replace(changing)
        done = {host.name: Installed("shared") for host in shared}
        done |= {host.name: Installed("up to date") for host in same}
        for host in self._well(changing):
            copied = found[host.name]
            sizes = (copied.files, copied.size_bytes, len(copied.removed))
            done[host.name] = Installed("installed", *sizes)
        whole = self._well(self.hosts)
        if self.wheel is not None and whole and not self.dry_run:
            self._bring_wheel(self.wheel, whole, done)
        for host in self.hosts:
            result = HostResult(host, Outcome.OK, self._seconds(), done.get(host.name))
            yield self._failed.get(host.name, result)

    def _well(self, hosts: Sequence[Host]) -> list[Host]:
        return [host for host in hosts if host.name not in self._failed]

    def _fail(self, name: str, why: str) -> None:
        (host,) = (host for host in self.hosts if host.name == name)
        self._failed[name] = HostResult(
            host, Outcome.FAILED, self._seconds(), error=f"host {name}: {why}"
        )

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _replace(self, hosts: Sequence[Host]) -> dict[str, Copied]:
        """Copy the environment, check it and give it its name; return what was copied by host."""
        prefix, stamp = self.environment.prefix, secrets.token_hex(16)
        self._each(hosts, "preparing", lambda there: _act(there, "seed", prefix=prefix))
        copied = self._copy(self._well(hosts), new_name(prefix))
        self._each(self._well(hosts), "checking", self._check(new_name(prefix)))
        self._each(
            self._well(hosts),
            "switching",
            lambda there: _act(there, "switch", prefix=prefix, stamp=stamp),
            lambda why: why,
        )
        return copied

    def _each(
        self,
        hosts: Sequence[Host],
        step: str,
        task: Callable[[Connection], Any],
        why_failed: Callable[[Any], str] = lambda _: "",
    ) -> dict[str, Any]:
        """Do a step on every host; return the answers by host, and note the failures."""

        def on_host(host: Host, stopper: Stopper) -> Any:
            with connect(host, self.options) as connection:
                stopper.add_action(connection.close)
                return task(connection)

        if hosts:
            self.on_step(step)
        answers = {}
        for result in fan_out(hosts, on_host, self.fanout, STEP_S):
            answers[result.host.name] = result.value
            if not result.ok:
                self._failed[result.host.name] = replace(result, value=None)
            elif why := why_failed(result.value):
                self._fail(result.host.name, why)
        return answers

    def _copy(
        self, hosts: Sequence[Host], target: str, *, dry_run: bool = False
    ) -> dict[str, Copied]:
        """Copy the environment, and this package into it; return what was copied by host."""
        prefix, package = self.environment.prefix, self.environment.package
        inside = self.environment.site / "hvd_elastic"
        sources: list[tuple[Any, str, tuple[str, ...]]] = [(prefix, target, LEFT_OUT)]
        if package is not None:
            sources = [
                (prefix, target, (*LEFT_OUT, f"/{inside}")),
                (package, f"{target}/{inside}", LEFT_OUT),
            ]
        total = {host.name: Copied(0, 0, 0, 0, ()) for host in hosts}
        for source, place, spared in sources:
            if not self._well(hosts):
                break
            self.on_step("comparing" if dry_run else "copying")
            settings = CopySettings(
                delete=True,
                exclude=spared,
                passing=(COMPILED,),
                dry_run=dry_run,
                fanout=self.fanout,
            )
            for result in copy_to_hosts(
                self._well(hosts), f"{source}/", place, self.options, settings, None,
                self.on_progress,
            ):  # fmt: skip
                name, before = result.host.name, total[result.host.name]
                if result.ok:
                    total[name] = replace(
                        result.answer,
                        files=before.files + result.answer.files,
                        size_bytes=before.size_bytes + result.answer.size_bytes,
                        touched=before.touched + result.answer.touched,
                        removed=before.removed + result.answer.removed,
                    )
                else:
                    self._failed[name] = replace(result, value=None)
        return total

    def _check(self, prefix: str) -> Callable[[Connection], None]:
        """Return the task that compares an environment with this one and imports from it."""
        settings = CheckSettings()
        here = leader_facts(settings)
        used = used_frameworks(here["packages"])
        python = f"{prefix}/bin/python"

        def check(connection: Connection) -> None:
            host = connection.host
            request = {"packages": [*COMPARED], "folders": [], "names": [], "code": None}
            facts = run_script(connection, "look_at_host", request, STEP_S, python)
            reference = choose_reference(here, {host.name: facts}, settings)
            for each in check_host(host, facts, reference, settings):
                if each.name in CHECKED and each.level is Level.FAILED:
                    raise SshError(f"host {host.name}: {each.name}: {each.detail}")
            for framework in used:
                program = f"import horovod.{framework}, hvd_elastic.{framework}"
                words = [python, "-c", FROM_NO_WORKING_FOLDER + program]
                result = connection.run(words, STEP_S)
                if not result.ok:
                    text = result.stderr.decode("utf-8", "replace").strip()
                    why = text.splitlines()[-1] if text else f"exit status {result.exit_status}"
                    raise SshError(f"host {host.name}: {program!r} fails with {python}: {why}")

        return check

    def _bring_wheel(self, wheel: Path, hosts: Sequence[Host], done: dict[str, Installed]) -> None:
        """Copy the kept wheel of Horovod; a host without it works as well, and gets a note."""
        target = f"~/.cache/hvd_elastic/wheels/{wheel.name}"
        settings = CopySettings(fanout=self.fanout)
        for result in copy_to_hosts(hosts, f"{wheel}/", target, self.options, settings):
            if not result.ok:
                name = result.host.name
                done[name] = replace(done[name], note=f"Horovod's wheel: {result.error}")


def used_frameworks(packages: Mapping[str, str | None]) -> list[str]:
    """Return the frameworks with which this environment trains: Horovod is compiled for them.

    One for GPUs is not compiled for TensorFlow, which may be installed all the same. If Horovod is
    compiled for none, all that are installed are returned, whose imports say so.

    Args:
        packages: installed versions by the name of the package.
    """
    installed = [name for name in FRAMEWORKS if packages[name]]
    return [name for name in installed if has_library(name)] or installed


def why_not(facts: Mapping[str, Any], environment: Environment) -> str:
    """Return why the environment cannot work on a host, or "".

    Args:
        facts: answer of ``describe_environment`` of ``programs/environment.py``.
    """
    if facts["machine"] != platform.machine():
        return f"its processor is {facts['machine']}, here it is {platform.machine()}{_OF_ITS_OWN}"
    (name, _, version), (name_here, _, here) = (
        text.partition(" ") for text in (facts["libc"], libc())
    )
    if name != name_here or (version and Version(version) < Version(here)):
        there = facts["libc"] or "another C library"
        return f"it has {there}, here it is {libc() or 'another'}{_OF_ITS_OWN}"
    base, version_here = environment.base, platform.python_version()
    if base is not None and facts["base"].split(".")[:2] != version_here.split(".")[:2]:
        what = f"is Python {facts['base']} there" if facts["base"] else "does not run there"
        minor = ".".join(version_here.split(".")[:2])
        how = f"Install Python {minor} there as here"
        if not base.is_relative_to("/usr"):
            how = f"Copy it: copyclust HOSTFILE {base.parents[1]} {base.parents[1]}"
        elif facts["base"]:  # its place is taken there
            how = (
                f"Install python{minor} there, which may be beside the other, and make this "
                f"environment again by {base.with_name(f'python{minor}')}; `make clean && make "
                "horovod` does so"
            )
        return f"{base} {what}, and this environment was made by it, Python {version_here}. {how}"
    return ""


def why_kept(looked: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return why environments that differ must not be changed, by host; those that may are not in.

    Args:
        looked: what ``describe_environment`` of ``programs/environment.py`` answered, by host.
    """
    busy = fold_hosts([name for name, facts in looked.items() if facts["in_use"]])
    why = {}
    for name, facts in looked.items():
        if facts["kept"]:
            why[name] = facts["kept"]
        elif facts["in_use"]:
            why[name] = (
                f"{facts['in_use']}, and would change. Call again when they have ended, or install "
                "from an environment at another path"
            )
        elif busy:
            why[name] = f"not changed, since the environment is in use on {busy}"
    return why


def uninstall(
    hosts: Sequence[Host],
    prefix: str,
    names: Sequence[str],
    options: SshOptions,
    fanout: int = DEFAULT_FANOUT,
) -> Iterator[HostResult[list[dict[str, Any]]]]:
    """List what this package has on every host, and remove what is under some names.

    Args:
        prefix: folder of the environment; "" if there is none.
        names: of ``environment``, ``cache`` and ``runs``, what is removed.
        fanout: maximum number of hosts at a time.

    Yields:
        For each host a list of "name", "path", "bytes", "stays" (why it cannot be removed, or ""),
        "others" (what else is in a folder of runs, and stays) and "removed".
    """

    def on_host(host: Host, stopper: Stopper) -> list[dict[str, Any]]:
        with connect(host, options) as connection:
            stopper.add_action(connection.close)
            own = {"prefix": prefix, "home": os.environ.get("HVD_ELASTIC_HOME", "")}
            return list(_act(connection, "remove", **own, names=list(names)))

    def assess(found: list[dict[str, Any]]) -> tuple[Outcome, str]:
        kept = [each for each in found if each["name"] in names and not each["removed"]]
        why = "; ".join(f"{each['path']} stays: {each['stays']}" for each in kept)
        return (Outcome.FAILED, why) if kept else (Outcome.OK, "")

    yield from fan_out(hosts, on_host, fanout, STEP_S, assess)


def _act(connection: Connection, do: str, **arguments: Any) -> Any:
    answer = run_script(connection, "environment", {"do": do, **arguments}, STEP_S)
    if "error" in answer:
        raise SshError(f"host {connection.host.name}: {answer['error']}")
    return answer["value"]
