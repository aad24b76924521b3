"""``hvd-elastic report-bug``: gathers what a report of a fault needs, without secrets."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated

from hvd_elastic import __version__
from hvd_elastic.cli.jobs.naming import open_run
from hvd_elastic.cli.machine.doctor import diagnose, render
from hvd_elastic.cli.options import OptionalRun, option
from hvd_elastic.cli.runs.show import last_lines
from hvd_elastic.errors import RunError
from hvd_elastic.formatting import bytes_words, count
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.secret_digests import read_digests, secrets_of

_EVENTS, _LINES, _LOGS = 400, 200, 16
_PACKAGES = re.compile(
    r"(hvd.elastic|horovod|torch.*|triton|tensorflow.*|keras|numpy|nvidia-.*|msgspec|paramiko|fabric"
    r"|lightning|transformers|accelerate|ray|pyspark|mpi4py)$",
    re.IGNORECASE,
)
_NAME = (
    r"(?:[\w-]*[_-])?"
    r"(?:(?:api|access|secret|private)[_-]?key|token|secret|password|passwd|passphrase)"
)
_QUOTE = r"(?:\\*[\"'])?"  # escaped, where JSON is text in JSON
_VALUE = r"([^\s\"',;&]+)"
_SECRETS = (
    re.compile(rf"(?i)((?<![\w-])-*{_NAME}{_QUOTE}\s*[=:]\s*{_QUOTE}){_VALUE}"),
    re.compile(rf"(?i)(--{_NAME}{_QUOTE},?\s+{_QUOTE}){_VALUE}"),
    re.compile(r"(?i)(\b\w[\w+.-]*://)([^\s/@]+)(?=@)"),
    re.compile(rf"(?i)(\bbearer\s+|\bauthorization{_QUOTE}\s*[=:]\s*{_QUOTE}\w+\s+){_VALUE}"),
    re.compile(r"()(\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\b(?:ghp|gho|hf|sk|xox[abp])[_-][\w-]{16,})"),
)
"""What stands before a value, and the value."""
_REMOVED = "[removed]"


def report_bug(
    run: OptionalRun = None,
    out: Annotated[Path, option("file to write", "--out", "-o")] = Path("hvd-elastic-bug.txt"),
) -> None:
    """Gather versions, and the ends of a run's events and logs, in one file to look through.

    Nothing is sent. Values that look like secrets are replaced, your home folder and login too;
    names of hosts, the command and what the script printed stay: look through it.

    Examples:
      hvd-elastic report-bug

      hvd-elastic report-bug digits-3 --out digits.txt
    """
    folder = None
    try:
        folder = open_run(run)
    except RunError:
        if run is not None:
            raise
    if out.exists():
        raise _exists(out)
    print("looking at what is installed here, as hvd-elastic doctor does …", file=sys.stderr)
    text = "\n".join(_parts(folder))
    known = secrets_of(os.environ)
    for digests in () if folder is None else read_digests(folder.secrets):
        known |= digests.find(text)
    text, removed = without_secrets(text, known)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _exists(out) from None
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}") from error
    about = f"run {folder.run_id}" if folder else "this machine (there is no run)"
    print(
        f"{out}: {bytes_words(len(text.encode()))} about {about}; {count(removed, 'value')} removed"
    )
    print(
        "Look through it before you pass it on: it has names of hosts, the command and its output."
    )


def _exists(out: Path) -> RunError:
    return RunError(f"{out} exists; remove it, or name another file with --out")


def without_secrets(text: str, known: Collection[str]) -> tuple[str, int]:
    """Return a text without values that look like secrets, and how many were replaced.

    These are the ``known`` ones, ``NAME=VALUE`` with such a name, the user part of URLs, and keys
    of known forms. The home folder becomes ``~``, the login ``USER``.

    >>> without_secrets("--api-key=abcdef123 s3://me:pw@host/x lr=0.1", ())
    ('--api-key=[removed] s3://[removed]@host/x lr=0.1', 2)
    """
    removed = 0

    def replace(found: re.Match[str]) -> str:
        nonlocal removed
        removed += 1
        return found[1] + _REMOVED

    for value in sorted(known, key=len, reverse=True):  # one may be part of another
        removed += text.count(value)
        text = text.replace(value, _REMOVED)
    for pattern in _SECRETS:
        text = pattern.sub(replace, text)
    home, user = str(Path.home()), ""
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no account
        user = getpass.getuser()
    if home != "/":
        text = text.replace(home, "~")
    if user not in ("", "root"):
        text = re.sub(rf"\b{re.escape(user)}\b", "USER", text)
    return text, removed


def _parts(folder: RunFolder | None) -> Iterator[str]:
    yield f"# hvd_elastic {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"\n## packages of {sys.prefix}\n"
    # a package without a name is one that was removed, of which a file is left
    named = [each for each in distributions() if "Name" in (each.metadata or ())]
    found = {each.name: each.version for each in named if _PACKAGES.match(each.name)}
    yield from (f"{name} {version}" for name, version in sorted(found.items()))
    # The logs of a run say what its imports did, which takes seconds of all cores to try.
    yield f"\n## hvd-elastic doctor\n\n{render(diagnose(imports=folder is None))}"
    if folder is None:
        return
    yield f"\n## run {folder.run_id}\n\n{json.dumps(folder.read_run())}"
    yield f"\n## its last events ({folder.events.name})\n"
    yield from _end_of(folder.events, _EVENTS)
    logs = sorted(folder.logs.glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (folder.leader_log, *logs[:_LOGS]):
        if path.is_file():
            yield f"\n## the end of {path.name}\n"
            yield from _end_of(path, _LINES)
    if left_out := [path.name for path in logs[_LOGS:]]:
        yield f"\nleft out: {', '.join(left_out)}"


def _end_of(path: Path, lines: int) -> list[str]:
    found, _ = last_lines(path, lines, whole=False)
    return [line.decode(errors="backslashreplace") for line in found]
