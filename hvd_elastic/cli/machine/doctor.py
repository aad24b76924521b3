"""Implement ``hvd-elastic doctor``: what is installed and missing, and the command that fixes it.

Nothing large is imported here. Horovod, whose library may crash on import, is imported in another
process.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hvd_elastic import __version__
from hvd_elastic.cli.options import AsJson
from hvd_elastic.config import home, nearest_existing
from hvd_elastic.errors import BuildError
from hvd_elastic.formatting import bytes_words, count, unfiltered
from hvd_elastic.frameworks import (
    LIGHTNING_REQUIREMENT,
    TENSORFLOW_REQUIREMENTS,
    TITLES,
    TORCH_REQUIREMENT,
    TRANSFORMERS_REQUIREMENTS,
    TRITON_FIRST,
    has_triton,
    install_command,
    tensorflow_version,
    version_of,
    why_no_lightning,
    why_no_tensorflow,
    why_no_torch,
    why_no_transformers,
)
from hvd_elastic.hosts.account import how_to_mend_shell, why_no_commands
from hvd_elastic.install.horovod_wheel import (
    ask_horovod,
    has_gpu,
    installed_build,
    torch_cuda,
    wheel_cache,
    why_left_out,
)
from hvd_elastic.install.prerequisites import (
    PREREQUISITES,
    Prerequisite,
    apt_command,
    has_apt,
)
from hvd_elastic.programs.nvidia import ask_nvidia_smi
from hvd_elastic.virtual.netns import why_no_namespaces

_BUILD_WITH = "hvd-elastic build-horovod"
_LOW_DISK_BYTES = 2_000_000_000
_HOROVOD_TIMEOUT_S = 120


class Health(str, Enum):
    """Severity of a finding."""

    GOOD = "ok"
    OPTIONAL = "optional"
    """Missing, but training can run without it."""
    MISSING = "missing"
    """Missing or broken, and training cannot run without it."""


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        mend: command or step that fixes it; empty if nothing needs to be done.
    """

    name: str
    health: Health
    found: str
    mend: str = ""


def diagnose(*, imports: bool = True) -> list[Finding]:
    """Check everything and return the findings in the order of the printed lines.

    Args:
        imports: whether to import Horovod for each framework in a process, which takes seconds.
    """
    return [
        Finding(
            "hvd_elastic", Health.GOOD, f"{__version__} in {Path(__file__).resolve().parents[2]}"
        ),
        _python(),
        *_packages(),
        *_frameworks(),
        *_lightning(),
        *_transformers(),
        _horovod(imports=imports),
        *(_prerequisite(item) for item in PREREQUISITES),
        _gpu(),
        _wheels(),
        _home(home()),
        _login_shell(),
        _virtual_hosts(),
    ]


def doctor(
    as_json: AsJson = False,
) -> None:
    """Report what is installed, built and missing, with the command that fixes it.

    The exit status is 1 if something is missing without which training cannot run.

    Examples:
      hvd-elastic doctor
      hvd-elastic doctor --json | jq '.findings[] | select(.health != "ok")'
    """
    findings = diagnose()
    missing = [item for item in findings if item.health is Health.MISSING]
    if as_json:
        print(json.dumps({"healthy": not missing, "findings": [asdict(f) for f in findings]}))
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(render(findings, colour=colour), file=unfiltered(sys.stdout))
    if missing:
        raise typer.Exit(1)


def render(findings: Sequence[Finding], *, colour: bool = False) -> str:
    """Return the lines for a terminal, with each fix under its finding.

    >>> print(render([Finding("torch", Health.MISSING, "not installed", "pip install torch")]))
    missing   torch  not installed
                     -> pip install torch
    <BLANKLINE>
    1 thing is missing without which training cannot run: torch
    """
    width = max(len(item.name) for item in findings)
    paint = {Health.GOOD: "32", Health.OPTIONAL: "33", Health.MISSING: "31"}
    lines = []
    for item in findings:
        word = f"{item.health.value:<8}"
        if colour:
            word = f"\x1b[{paint[item.health]}m{word}\x1b[0m"
        lines.append(f"{word}  {item.name:<{width}}  {item.found}")
        if item.mend:
            lines.append(f"{'':<8}  {'':<{width}}  -> {item.mend}")
    missing = [item.name for item in findings if item.health is Health.MISSING]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        end = (
            f"{count(len(missing), 'thing')} {verb} missing without which training cannot run: "
            f"{', '.join(missing)}"
        )
    else:
        end = "Everything that training needs is there."
    return "\n".join([*lines, "", end])


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    found, fits = f"{version} ({sys.executable})", _requirements()[0]
    if version not in SpecifierSet(fits):
        mend = f"make a virtual environment with another Python ({fits})"
        return Finding("python", Health.MISSING, f"{found}, and hvd_elastic needs {fits}", mend)
    return Finding("python", Health.GOOD, found)


def _packages() -> list[Finding]:
    """Return a line for each package that ours requires here without an extra."""
    asked = [Requirement(text) for text in _requirements()[1]]
    here = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [_package(needs) for needs in here]


def _package(needs: Requirement) -> Finding:
    version, mend = version_of(needs.name), install_command(f"{needs.name}{needs.specifier}")
    if version is None:
        return Finding(needs.name, Health.MISSING, "not installed", mend)
    if not needs.specifier.contains(version, prereleases=True):
        found = f"{version}, and hvd_elastic needs {needs.specifier}"
        return Finding(needs.name, Health.MISSING, found, mend)
    return Finding(needs.name, Health.GOOD, version)


def _requirements() -> tuple[str, list[str]]:
    """Return the versions of Python and the packages that ours needs; none if pip has not it."""
    try:
        found = metadata("hvd-elastic")
    except PackageNotFoundError:
        return "", []
    return found["Requires-Python"], found.get_all("Requires-Dist") or []


def _versions() -> dict[str, str]:
    """Return the versions of installed frameworks that scripts can train with, by module name."""
    torch = version_of("torch")
    found = {"torch": torch if torch and why_no_torch(torch) is None else None}
    if why_no_tensorflow(tensorflow_version(), version_of("keras"), os.environ) is None:
        found["tensorflow"] = tensorflow_version()
    return {name: version for name, version in found.items() if version is not None}


def _frameworks() -> list[Finding]:
    """Return a line for each framework; one of them is enough."""
    usable = _versions()
    health = Health.OPTIONAL if usable else Health.MISSING
    version, mend = version_of("torch"), install_command(TORCH_REQUIREMENT)
    if "torch" not in usable:
        why = why_no_torch(version) if version else "not installed"
        torch = Finding("torch", health, str(why), mend)
    elif not Requirement(TORCH_REQUIREMENT).specifier.contains(usable["torch"], prereleases=True):
        why = f"{version}; Horovod is known to compile for {TORCH_REQUIREMENT}"
        torch = Finding("torch", Health.OPTIONAL, why, mend)
    else:
        torch = Finding("torch", Health.GOOD, usable["torch"])
    version, keras = tensorflow_version(), version_of("keras")
    if "tensorflow" in usable:
        tensorflow = Finding("tensorflow", Health.GOOD, f"{version} with Keras {keras}")
    else:
        why = why_no_tensorflow(version, keras, os.environ) if version else "not installed"
        mend = install_command(*TENSORFLOW_REQUIREMENTS)
        tensorflow = Finding("tensorflow", health, str(why), mend)
    findings = [torch, tensorflow]
    if {"torch", "tensorflow"} <= usable.keys() and has_triton():
        why = "PyTorch's triton dies of signal 11 in a process that has loaded TensorFlow before"
        mend = f"in such a script, {TRITON_FIRST}"
        findings.append(Finding("triton", Health.OPTIONAL, why, mend))
    return findings


def _lightning() -> list[Finding]:
    """Return a line for Lightning if it is installed."""
    version = version_of("lightning", "pytorch-lightning")
    if version is None:
        return []
    why = why_no_lightning(version)
    if why is None:
        return [Finding("lightning", Health.GOOD, version)]
    return [Finding("lightning", Health.OPTIONAL, why, install_command(LIGHTNING_REQUIREMENT))]


def _transformers() -> list[Finding]:
    """Return a line for Hugging Face's transformers if they are installed."""
    version = version_of("transformers")
    if version is None:
        return []
    why = why_no_transformers(version, version_of("accelerate"))
    if why is None:
        return [Finding("transformers", Health.GOOD, version)]
    mend = install_command(*TRANSFORMERS_REQUIREMENTS)
    return [Finding("transformers", Health.OPTIONAL, why, mend)]


def _horovod(*, imports: bool = True) -> Finding:
    build = installed_build()
    if build is None:
        return Finding("horovod", Health.MISSING, "not installed", _BUILD_WITH)
    version = version_of("horovod")
    if not imports:
        found = f"{version}, {build or 'not our patched build'}; not imported"
        return Finding("horovod", Health.GOOD, found)
    parts, failures = [], []
    names = list(_versions())
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda name: ask_horovod(name, _HOROVOD_TIMEOUT_S), names))
    for name, (built, why) in zip(names, answers, strict=True):
        if built is None:
            failures.append(f"{TITLES[name]}: {why.splitlines()[-1].strip()}")
        elif not built.get("gloo"):
            failures.append(f"{TITLES[name]}: built without gloo, which elastic runs need")
        else:
            has = ", ".join(f"{part} {'yes' if yes else 'no'}" for part, yes in built.items())
            parts.append(f"{TITLES[name]} ({has})")
    found = f"{version} built for {' and '.join(parts)}" if parts else f"{version} is of no use"
    if not names:
        found, mend = f"{version}; no framework to train with", f"install one, then {_BUILD_WITH}"
        return Finding("horovod", Health.MISSING, found, mend)
    answered = dict(zip(names, answers, strict=True))
    has_nccl = "torch" in names and bool((answered["torch"][0] or {}).get("nccl"))
    needs_nccl = "torch" in names and torch_cuda() is not None and (has_nccl or _has_gpu())
    if failures:
        health, mend = Health.OPTIONAL if parts else Health.MISSING, _BUILD_WITH
        if parts and needs_nccl and not answered.get("tensorflow", (True,))[0]:
            mend = why_left_out(torch_cuda()) or mend
        return Finding("horovod", health, f"{found}; not for {'; '.join(failures)}", mend)
    if needs_nccl and not has_nccl:
        why = f"{found}; without NCCL, so ranks on GPUs of this machine cannot train"
        return Finding("horovod", Health.OPTIONAL, why, f"{_BUILD_WITH} --with-nccl")
    if not build:
        # It works, but a process whose initialisation failed once cannot join again.
        return Finding("horovod", Health.OPTIONAL, f"{found}; not our patched build", _BUILD_WITH)
    return Finding("horovod", Health.GOOD, found)


def _has_gpu() -> bool:
    try:
        return has_gpu()
    except BuildError:  # the line of the GPU tells why
        return False


def _prerequisite(item: Prerequisite) -> Finding:
    found = item.find()
    if found is not None:
        return Finding(item.name, Health.GOOD, found)
    mend = apt_command([item], sudo=os.geteuid() != 0) if has_apt() else f"install {item.name}"
    # A host that only runs workers needs no compiler, and a leader connects without ssh and sshd.
    found = f"not found; without it you cannot {item.purpose.value}"
    return Finding(item.name, Health.OPTIONAL, found, mend)


def _gpu() -> Finding:
    answer = ask_nvidia_smi("--query-gpu=name")
    if answer is None:
        return Finding("gpu", Health.OPTIONAL, "no nvidia-smi: training runs on the CPU")
    if answer.status is None:
        return Finding("gpu", Health.OPTIONAL, "nvidia-smi does not answer")
    if answer.error or not answer.lines:
        return Finding("gpu", Health.OPTIONAL, "nvidia-smi finds none")
    found = f"{len(answer.lines)} x {answer.lines[0]}"
    if "torch" in _versions() and torch_cuda() is None:
        why = f"{found}; PyTorch {version_of('torch')} is for CPUs and does not use it"
        mend = f"install a PyTorch for CUDA, as PyPI has it, then {_BUILD_WITH}"
        return Finding("gpu", Health.OPTIONAL, why, mend)
    return Finding("gpu", Health.GOOD, found)


def _wheels() -> Finding:
    cache = wheel_cache()
    wheels = sorted(cache.glob("*/horovod-*.whl"))
    if not wheels:
        return Finding("kept wheels", Health.OPTIONAL, f"none in {cache}")
    size = sum(wheel.stat().st_size for wheel in wheels)
    return Finding(
        "kept wheels", Health.GOOD, f"{count(len(wheels), 'wheel')}, {bytes_words(size)} in {cache}"
    )


def _home(folder: Path) -> Finding:
    there = nearest_existing(folder)
    free = shutil.disk_usage(there).free
    found = f"{folder}, {bytes_words(free)} free"
    if not os.access(there, os.W_OK):
        mend = "name another folder in HVD_ELASTIC_HOME"
        return Finding("home", Health.MISSING, f"{folder} is not writable", mend)
    if free < _LOW_DISK_BYTES:
        mend = "free some, or name another folder in HVD_ELASTIC_HOME"
        return Finding("home", Health.OPTIONAL, found, mend)
    return Finding("home", Health.GOOD, found)


def _login_shell() -> Finding:
    account = _account()
    if account is None:
        found = f"user id {os.geteuid()} has no entry in /etc/passwd: no login is possible"
        return Finding("login shell", Health.OPTIONAL, found, "work as a named user")
    fault = why_no_commands(account)
    if fault is None:
        return Finding("login shell", Health.GOOD, account.pw_shell or "/bin/sh")
    # Training on this machine alone needs no login.
    found = f"{fault}: no virtual hosts, and no other machine can use this one as a host"
    return Finding("login shell", Health.OPTIONAL, found, how_to_mend_shell(account))


def _virtual_hosts() -> Finding:
    account = _account()
    if account is None or why_no_commands(account) is not None:
        return Finding("virtual hosts", Health.OPTIONAL, "none; see login shell")
    refusal = why_no_namespaces()
    if refusal is None:
        return Finding("virtual hosts", Health.GOOD, "network namespaces (root)")
    return Finding("virtual hosts", Health.OPTIONAL, f"loopback only: {refusal}")


def _account() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(os.geteuid())
    except KeyError:
        return None
