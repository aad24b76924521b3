"""Apply a unified diff in pure Python, exactly or not at all.

``patch`` is missing on minimal machines and forgives offsets and fuzz; a source tree that is about
to be compiled into everybody's ranks is patched where the diff says, or the build stops.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hvd_elastic.errors import BuildError

__all__ = ["FilePatch", "Hunk", "apply_patch", "parse_patch"]

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """Lines at ``start`` (from 1) that must read ``old`` and become ``new``."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FilePatch:
    """All hunks for one existing file."""

    path: str
    hunks: tuple[Hunk, ...]


def parse_patch(text: str) -> list[FilePatch]:
    """The file patches in ``text``; paths lose their ``a/``, ``b/`` prefix.

    Only changes of existing text files are known: that is all the Horovod patch needs.

    Raises:
        BuildError: the text is no such diff; names the line.
    """
    lines = text.splitlines()
    patches: list[FilePatch] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith("--- "):
            at += 1
            continue
        if at + 1 >= len(lines) or not lines[at + 1].startswith("+++ "):
            raise BuildError(f"patch line {at + 1}: a line '+++ b/FILE' must follow '--- a/FILE'")
        path = _path(lines[at + 1], at + 2)
        at += 2
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith("@@"):
            hunk, at = _hunk(lines, at)
            hunks.append(hunk)
        if not hunks:
            raise BuildError(f"patch line {at + 1}: no '@@ … @@' hunk for {path}")
        patches.append(FilePatch(path, tuple(hunks)))
    if not patches:
        raise BuildError("the patch holds no '--- a/FILE' line: it is not a unified diff")
    return patches


def apply_patch(text: str, folder: Path) -> list[str]:
    """Apply the diff to the tree in ``folder`` and return the changed paths.

    Every hunk of every file is checked before the first file is written.

    Raises:
        BuildError: a file is missing or a hunk does not fit; names file, line, and both texts.
    """
    results: list[tuple[Path, str]] = []
    patches = parse_patch(text)
    for patch in patches:
        target = folder / patch.path
        try:
            content = target.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise BuildError(f"the patch changes {patch.path}, which {folder} lacks") from None
        results.append((target, _patched(content, patch)))
    for target, content in results:
        target.write_text(content, encoding="utf-8")
    return [patch.path for patch in patches]


def _path(line: str, number: int) -> str:
    name = line[4:].split("\t", 1)[0].strip()
    path = PurePosixPath(name)
    if path.parts[:1] in (("a",), ("b",)):
        path = PurePosixPath(*path.parts[1:])
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise BuildError(f"patch line {number}: {name!r} is not a path inside the source tree")
    return str(path)


def _hunk(lines: list[str], at: int) -> tuple[Hunk, int]:
    found = _HUNK.match(lines[at])
    if found is None:
        raise BuildError(f"patch line {at + 1}: {lines[at]!r} is not '@@ -a,b +c,d @@'")
    start, old_count, _, new_count = found.groups()
    expected = (int(old_count or 1), int(new_count or 1))
    old: list[str] = []
    new: list[str] = []
    first = at
    at += 1
    while (len(old), len(new)) != expected:
        line = lines[at] if at < len(lines) else None
        if line is None or (line and line[0] not in " +-"):
            raise BuildError(
                f"patch line {first + 1}: the hunk ends after {len(old)} old and {len(new)} new "
                f"lines, its header says {expected[0]} and {expected[1]}"
            )
        # an editor that strips trailing blanks turns an empty context line into ""
        sign, rest = (line[0], line[1:]) if line else (" ", "")
        if sign in " -":
            old.append(rest)
        if sign in " +":
            new.append(rest)
        at += 1
    return Hunk(int(start), tuple(old), tuple(new)), at


def _patched(content: str, patch: FilePatch) -> str:
    # split on "\n" alone, so that what is not touched stays byte for byte
    lines = content.split("\n")
    shift = 0
    for hunk in patch.hunks:
        first = hunk.start - 1 + shift
        there = lines[first : first + len(hunk.old)]
        if there != list(hunk.old):
            raise BuildError(_misfit(patch.path, hunk, there))
        lines[first : first + len(hunk.old)] = hunk.new
        shift += len(hunk.new) - len(hunk.old)
    return "\n".join(lines)


def _misfit(path: str, hunk: Hunk, there: list[str]) -> str:
    for offset, wanted in enumerate(hunk.old):
        found = there[offset] if offset < len(there) else "(end of file)"
        if found != wanted:
            return (
                f"the patch does not fit {path}, line {hunk.start + offset}: "
                f"expected {wanted!r}, found {found!r}; "
                "the source is not the release that the patch was made for"
            )
    raise AssertionError("a hunk that fits was called a misfit")
