"""Put the scripts of scripts/examples/migration/ into pages of docs/, as diffs and line counts.

A place is marked there with ``<!-- diff: BEFORE AFTER -->`` or ``<!-- lines -->``, and ends with
``<!-- end -->``. A test compares the page with what this makes of it.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["PAGES", "SCRIPTS", "renew"]

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts" / "examples" / "migration"
PAGES = {
    ROOT / "docs" / "migration.md": {
        "plain PyTorch": ("from_plain.py", "to_elastic.py"),
        "DistributedDataParallel with a snapshot file": ("from_ddp.py", "to_elastic.py"),
        "Horovod, fixed size": ("from_horovod.py", "to_elastic.py"),
        "Horovod, elastic": ("from_horovod_elastic.py", "to_elastic.py"),
        "AdaptDL": ("from_adaptdl.py", "to_adaptive.py"),
    },
    ROOT / "docs" / "migration-tensorflow.md": {
        "Keras, `model.fit`": ("keras_plain.py", "keras_elastic.py"),
        "Keras, `MultiWorkerMirroredStrategy`": ("keras_multiworker.py", "keras_elastic.py"),
        "Keras, Horovod": ("keras_horovod.py", "keras_elastic.py"),
        "a loop of TensorFlow": ("loop_plain.py", "loop_elastic.py"),
        "a loop with Horovod": ("loop_horovod.py", "loop_elastic.py"),
    },
}
"""Page → what one comes from → script before, script after."""

_PLACE = re.compile(
    r"<!-- (?P<what>lines|diff: (?P<before>\S+) (?P<after>\S+)) -->\n.*?<!-- end -->", re.DOTALL
)


def _lines(name: str) -> list[str]:
    return (SCRIPTS / name).read_text(encoding="utf-8").splitlines()


def diff(before: str, after: str) -> list[str]:
    """The unified diff of two scripts, without its header."""
    return list(difflib.unified_diff(_lines(before), _lines(after), lineterm=""))[2:]


def line_counts(pairs: Mapping[str, tuple[str, str]]) -> str:
    """Lines before and after, removed and added, as a Markdown table; blank lines do not count."""
    rows = ["| from | lines | after | removed | added |", "|---|---|---|---|---|"]
    for name, (before, after) in pairs.items():
        whole = [sum(bool(line.strip()) for line in _lines(script)) for script in (before, after)]
        changed = [
            sum(line[0] == sign and bool(line[1:].strip()) for line in diff(before, after))
            for sign in "-+"
        ]
        rows.append(f"| {name} | {' | '.join(str(number) for number in (*whole, *changed))} |")
    return "\n".join(rows)


def renew(text: str, pairs: Mapping[str, tuple[str, str]]) -> str:
    """``text`` with every marked place made anew."""

    def replace(found: re.Match[str]) -> str:
        if found["before"]:
            body = "\n".join(["```diff", *diff(found["before"], found["after"]), "```"])
        else:
            body = line_counts(pairs)
        return f"<!-- {found['what']} -->\n{body}\n<!-- end -->"

    return _PLACE.sub(replace, text)


def main() -> int:
    """Command line."""
    for page, pairs in PAGES.items():
        page.write_text(renew(page.read_text(encoding="utf-8"), pairs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
