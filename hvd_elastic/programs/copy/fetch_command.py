"""Fill in a user's shell command with placeholders, such as ``cp /mnt/set/{path} {dst}/{path}``.

Values are variables of its environment, so that the shell never parses one.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"""\\.|['"`()]|(?<!\$)\{(dst|list|path)\}""", re.DOTALL)


def placeholders(command: str) -> list[str]:
    """Return the names of the placeholders in a command.

    >>> placeholders("rclone copy --files-from-raw {list} far:set {dst} | awk '{print}'")
    ['list', 'dst']
    """
    return [name for name in (match[1] for match in _TOKEN.finditer(command)) if name]


def variables(values: dict[str, str]) -> dict[str, str]:
    """Return the variables that a filled-in command needs in its environment."""
    return {f"hvd_{name}": value for name, value in values.items()}


def fill(command: str, values: dict[str, str]) -> str:
    """Return the command with a variable for each placeholder, quoted for its place.

    Args:
        command: command for sh.
        values: values by name; a placeholder without a value stays.

    >>> print(fill("cp {path} '/a/{path}'", {"path": "two words"}))
    cp "${hvd_path}" '/a/'"${hvd_path}"''
    """
    quote = ""
    outer: list[tuple[str, str]] = []  # what each open bracket or backquote is, and is within

    def replace(match: re.Match[str]) -> str:
        nonlocal quote
        text, name = match[0], match[1]
        if name in values:
            variable = f"${{hvd_{name}}}"
            return {"": f'"{variable}"', '"': variable, "'": f"'\"{variable}\"'"}[quote]
        if quote == "'":
            # Between single quotes a backslash has no meaning.
            quote = "" if text[-1] == "'" else quote
        elif text in ("'", '"'):
            if text == quote:
                quote = ""
            elif not quote:
                quote = text
        elif text == "(" and (not quote or command[match.start() - 1] == "$"):
            outer.append((")", quote))
            quote = ""
        elif text == "`" and (not outer or outer[-1][0] != text):
            outer.append((text, quote))
            quote = ""
        elif outer and text == outer[-1][0] and not quote:
            quote = outer.pop()[1]
        return text

    return _TOKEN.sub(replace, command)
