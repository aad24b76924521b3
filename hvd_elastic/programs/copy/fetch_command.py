"""Fill in a user's shell command with placeholders, such as ``cp /mnt/set/{path} {dst}/{path}``."""

from __future__ import annotations

import re
import shlex

_TOKEN = re.compile(r"""\\.|'|"|(?<!\$)\{(dst|list|path)\}""", re.DOTALL)
_SPECIAL = re.compile(r"""([$`"\\])""")


def placeholders(command: str) -> list[str]:
    """Return the names of the placeholders in a command.

    >>> placeholders("rclone copy --files-from-raw {list} far:set {dst} | awk '{print}'")
    ['list', 'dst']
    """
    return [name for name in (match[1] for match in _TOKEN.finditer(command)) if name]


def fill(command: str, values: dict[str, str]) -> str:
    """Return the command with its placeholders replaced, each value quoted for its place.

    Args:
        command: command for sh.
        values: values by name; a placeholder without a value stays.

    >>> print(fill("cp {path} '/a/{path}'", {"path": "two words"}))
    cp 'two words' '/a/two words'
    """
    quote = ""

    def replace(match: re.Match[str]) -> str:
        nonlocal quote
        text, name = match[0], match[1]
        if name is None:
            if text in ("'", '"'):
                if not quote:
                    quote = text
                elif quote == text:
                    quote = ""
            elif quote == "'" and text[1] == "'":
                quote = ""  # between single quotes a backslash has no meaning
            return text
        value = values.get(name)
        if value is None:
            return text
        if quote == "'":
            return value.replace("'", "'\\''")
        if quote == '"':
            return _SPECIAL.sub(r"\\\1", value)
        return shlex.quote(value)

    return _TOKEN.sub(replace, command)
