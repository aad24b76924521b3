"""Make the checkout's environment: system packages, ``.venv``, frameworks, then everything else.

Run by ``make`` with whatever Python the user has; standard library only. The frameworks among the
extras are installed first and pinned for all later steps, since the Horovod wheel fits exactly one
build of each.

    python3 scripts/setup_env.py --venv .venv --torch torch==2.13.0 --extras torch,dev
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from hvd_elastic.config import home, nearest_existing  # noqa: E402
from hvd_elastic.errors import BuildError, HvdElasticError, UsageError  # noqa: E402
from hvd_elastic.install.prerequisites import (  # noqa: E402
    BROWSERS,
    BUILD_REQUIREMENTS,
    PREREQUISITES,
    RUN_REQUIREMENTS,
    Prerequisite,
    Purpose,
    apt_command,
    build_folder,
    check_build_space,
    find_program,
    has_apt,
    machine_and_libc,
    missing,
    pip_arguments,
)
from hvd_elastic.install.quiet import run_quietly  # noqa: E402
from hvd_elastic.records.process_lock import lock_held  # noqa: E402

BASE_PACKAGES = ("pip", *BUILD_REQUIREMENTS, *RUN_REQUIREMENTS)
PATCH = next((ROOT / "hvd_elastic" / "install").glob("horovod-*.patch"))
APT_LISTS = Path("/var/lib/apt/lists")
# dpkg finishes the package that it unpacks; killed, it leaves a system that has to be repaired.
APT_PATIENCE_S = 600.0
ENGINE_PREREQUISITES = tuple(
    Prerequisite(name, functools.partial(find_program, name), (package,), Purpose.ENGINES, True)
    for name, package in (
        ("slurmctld", "slurmctld"),
        ("slurmd", "slurmd"),
        ("srun", "slurm-client"),
        ("munged", "munge"),
        ("java", "openjdk-17-jre-headless"),
        ("dpkg-source", "dpkg-dev"),
    )
)
"""What the tests of the engines need; a user's engine brings its own."""
DEVELOPER_PREREQUISITES = (
    Prerequisite(
        "chromium",
        lambda: find_program(*BROWSERS),
        ("chromium",),
        Purpose.BROWSER,
        optional=True,
    ),
)
"""What tests need, and of users few."""


def ensure_system_packages(log: Path, wanted: Sequence[Prerequisite], build: bool) -> None:
    """Install what the machine lacks when we may, say what is lacking when we may not.

    Args:
        log: file for the output of apt-get.
        wanted: what the machine needs.
        build: whether Horovod will be compiled.

    Raises:
        BuildError: something is missing without which no environment can be made, or Horovod cannot
            be compiled, and this user cannot install it.
    """
    lacking = missing(wanted)
    if lacking and has_apt() and os.geteuid() == 0:
        needed = [item for item in lacking if not item.optional]
        if needed:
            _apt_install(needed, log)
        for item in lacking:
            if item.optional and item.find() is None and is_offered(item):
                try:
                    _apt_install([item], log)
                except BuildError as error:
                    print(f"without {item.name}: {str(error).splitlines()[0]}", flush=True)
        lacking = missing(wanted)
    if not lacking:
        return
    for item in lacking:
        extent = "you cannot" if not item.optional else "without it you cannot"
        print(f"missing: {item.name} ({extent} {item.purpose.value})")
    mend = "install them with your package manager"
    if has_apt() and (offered := [x for x in lacking if not x.optional or is_offered(x)]):
        mend = apt_command(offered)
    print(f"  to install what is missing: {mend}", flush=True)
    fatal = [Purpose.ENVIRONMENT, Purpose.BUILD] if build else [Purpose.ENVIRONMENT]
    for purpose in fatal:
        names = ", ".join(item.name for item in lacking if item.purpose is purpose)
        if names:
            raise BuildError(f"without {names} you cannot {purpose.value}; run: {mend}")


def is_offered(item: Prerequisite) -> bool:
    """Return whether apt knows the packages; as long as it has read no lists, it may.

    Ubuntu has no package chromium, and a command that names one installs nothing at all.
    """
    program = find_program("apt-cache")
    if program is None or not any(APT_LISTS.glob("*_Packages*")):
        return True
    shown = [subprocess.run([program, "show", x], capture_output=True).stdout for x in item.apt]
    return all(b"Package:" in text for text in shown)


def _apt_install(lacking: list[Prerequisite], log: Path) -> None:
    names = ", ".join(item.name for item in lacking)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    print(f"This machine lacks {names}; installing as root:", flush=True)
    command = apt_command(lacking, sudo=False).split()
    install = [*command[:2], "--no-install-recommends", *command[2:]]
    print(f"  {' '.join(install)}", flush=True)
    if not any(APT_LISTS.glob("*_Packages*")):
        _apt_update(environment, log)
    run = functools.partial(
        run_quietly,
        install,
        label="Installing system packages",
        log=log,
        environment=environment,
        patience_s=APT_PATIENCE_S,
    )
    try:
        run()
    except BuildError:
        # lists may be older than what the mirror still holds
        _apt_update(environment, log)
        run()


def _apt_update(environment: dict[str, str], log: Path) -> None:
    run_quietly(
        ["apt-get", "update"], label="Reading package lists", log=log, environment=environment
    )


def may_build() -> bool:
    """Return whether no Horovod is kept that may fit, so that it will be compiled."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    digest = hashlib.sha256(PATCH.read_bytes()).hexdigest()[:12]
    fits = f"{python}-{machine_and_libc()}-*patch-{digest}"
    kept = _cache().glob(f"hvd_elastic/wheels/horovod-*-{fits}/*.whl")
    return not any(kept)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def check_folders() -> None:
    """Check that the folders outside of the checkout can be written, which are used only later.

    Raises:
        BuildError: names the folder, and the variable that names another.
    """
    for folder, variable in ((_cache(), "XDG_CACHE_HOME"), (home(), "HVD_ELASTIC_HOME")):
        there = nearest_existing(folder)
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise BuildError(f"{folder} cannot be written; name another folder in {variable}")


def check_extras(extras: str) -> None:
    """Check that there are such extras, separated by commas; pip only warns of others.

    Raises:
        UsageError: names the wrong ones, and all that there are.
    """
    known = _extras()
    if wrong := [name for name in map(str.strip, extras.split(",")) if name and name not in known]:
        raise UsageError(
            f"EXTRAS={extras}: there is no extra {', '.join(wrong)}; there are: {', '.join(known)}"
        )


def _extras() -> dict[str, str]:
    """Return the first requirement of each extra of pyproject.toml; Python 3.10 reads no TOML."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return dict(re.findall(r'^(\w+) = \[\s*"([^"]+)"', table, re.MULTILINE))


def ensure_venv(venv: Path, log: Path) -> Path:
    """Return the environment's interpreter.

    An environment that is broken, was made by another Python or was moved is made anew: its
    programs lead to the old place.
    """
    python = venv / "bin" / "python"
    place = made_at(venv)
    if place is None and python.exists() and _version_of(python) == list(sys.version_info[:2]):
        return python
    if (venv / "pyvenv.cfg").exists():
        why = f"was made as {place}" if place else "was made by another Python or is broken"
        print(f"{venv} {why}; making it anew", flush=True)
        _empty(venv)
    # An environment leads to its Python by path, and python3 becomes another one with the system.
    version = "{}.{}".format(*sys.version_info)
    named = Path(sys.executable).with_name(f"python{version}")
    maker = named if named.exists() and named.samefile(sys.executable) else sys.executable
    run_quietly([str(maker), "-m", "venv", str(venv)], label=f"Making {venv.name}", log=log)
    return python


def made_at(venv: Path) -> Path | None:
    """Return the folder for which an environment was made, or None if that is its own."""
    with contextlib.suppress(OSError, ValueError):
        text = (venv / "bin" / "activate").read_text(encoding="utf-8")
        if found := re.search(r"VIRTUAL_ENV=([\"'/].*)$", text, re.MULTILINE):
            made = Path(shlex.split(found[1])[0])
            if made != venv and not (made.exists() and made.samefile(venv)):
                return made
    return None


def _version_of(python: Path) -> list[int] | None:
    try:
        done = subprocess.run(
            [str(python), "-c", "import sys, pip; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return [int(part) for part in done.stdout.split()] if done.returncode == 0 else None


def _empty(venv: Path) -> None:
    """Remove what venv and pip made; make's own notes and our log stay."""
    for entry in venv.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.suffix != ".log" and not entry.name.startswith("."):
            entry.unlink()


def install_packages(
    python: Path, venv: Path, frameworks: dict[str, str], extras: str, log: Path
) -> None:
    """Install the frameworks among ``extras``, then this checkout with them pinned.

    Args:
        python: interpreter of the environment.
        venv: folder of the environment.
        frameworks: what pip is asked for, by the name of the extra; empty: what pip chooses.
        extras: extras of pyproject.toml, separated by commas.
        log: file for pip's output.
    """
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    base = pip_arguments(BASE_PACKAGES, venv)
    run_quietly([*pip, *base], label="Installing pip and setuptools", log=log)
    wanted = [name.strip() for name in extras.split(",")]
    asked = {name: wish for name, wish in frameworks.items() if name in wanted and wish}
    for name, wish in asked.items():
        # TensorFlow has several names; its extra is for one of them.
        bounds = [_extras()[name]] if name == "torch" else []
        run_quietly([*pip, *bounds, wish], label=f"Installing {wish}", log=log)
    constraints = venv / "constraints.txt"
    pins = "".join(f"{pin}\n" for pin in _installed_frameworks(python))
    constraints.write_text(pins, encoding="utf-8")
    # An extra would install its own build of a framework over the one that was asked for.
    rest = ",".join(name for name in wanted if name and name not in asked)
    checkout = f"{ROOT}[{rest}]" if rest else str(ROOT)
    run_quietly(
        [
            *pip, "--constraint", str(constraints), "--no-build-isolation",
            "--editable", checkout,
        ],
        label=f"Installing hvd_elastic{f'[{rest}]' if rest else ''}",
        log=log,
    )  # fmt: skip


def _installed_frameworks(python: Path) -> list[str]:
    """Return installed frameworks as requirements of exactly their versions."""
    program = (
        "import importlib.metadata as m\n"
        "for name in ('torch', 'tensorflow', 'tensorflow-cpu', 'keras'):\n"
        "    try: print(f'{name}=={m.version(name)}')\n"
        "    except m.PackageNotFoundError: pass"
    )
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True)
    return done.stdout.split()


def _say_waiting(venv: Path) -> None:
    print(f"Another set-up of {venv} is running; waiting for it …", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the checkout's Python environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is asked for")
    parser.add_argument("--tensorflow", default="tensorflow-cpu==2.21.*", help="the same")
    parser.add_argument("--extras", default="torch,tensorflow,dev", help="extras of pyproject.toml")
    parser.add_argument(
        "--engines", action="store_true", help="also the system packages of Slurm and Spark"
    )
    parser.add_argument("--horovod", action="store_true", help="Horovod is wanted afterwards")
    arguments = parser.parse_args(argv)
    wanted = [*PREREQUISITES, *(ENGINE_PREREQUISITES if arguments.engines else ())]
    if "dev" in arguments.extras.split(","):
        wanted += DEVELOPER_PREREQUISITES
    venv = arguments.venv.absolute()
    log = venv / "setup.log"
    try:
        venv.mkdir(parents=True, exist_ok=True)
        with lock_held(venv / ".lock", lambda: _say_waiting(venv)):
            log.unlink(missing_ok=True)
            check_folders()
            check_extras(arguments.extras)
            builds = arguments.horovod and may_build()
            if builds:
                check_build_space(build_folder())
            ensure_system_packages(log, wanted, builds)
            python = ensure_venv(venv, log)
            frameworks = {"torch": arguments.torch, "tensorflow": arguments.tensorflow}
            install_packages(python, venv, frameworks, arguments.extras, log)
    except OSError as error:
        print(f"error: {error.filename or venv}: {error.strerror}", file=sys.stderr)
        return 1
    except HvdElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
