"""Fill in a user's shell command with placeholders, such as ``cp /mnt/set/{path} {dst}/{path}``.

Values are variables of its environment, so that the shell never parses one.
"""

from __future__ import annotations

import re

_NAME = r"(?<!\$)\{(?P<name>dst|list|path)\}"
_TOKEN = re.compile(rf"""\\.|['"`()\n]|(?<!<)<<(?!<)-?|{_NAME}""", re.DOTALL)
# The word that ends a here-document, after <<.
_WORD = re.compile(r"""[ \t]*((?:\\.|'[^']*'|"[^"]*"|[^\s'"\\;&|<>()`])+)""")


def placeholders(command: str) -> list[str]:
    """Return the names of the placeholders in a command.

    >>> placeholders("rclone copy --files-from-raw {list} far:set {dst} | awk '{print}'")
    ['list', 'dst']
    """
    return [match["name"] for match in _TOKEN.finditer(command) if match["name"]]


def literal_placeholders(command: str) -> list[str]:
    r"""Return the names of the placeholders in here-documents in which the shell replaces nothing.

    >>> literal_placeholders("cat <<'E' >{dst}/log\n{path}\nE\n")
    ['path']
    """
    literal: list[str] = []
    _fill(command, {}, "", literal)
    return literal


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
    return _fill(command, values, "", [])


def _fill(text: str, values: dict[str, str], quote: str, literal: list[str]) -> str:
    """Return a part of a command, filled in.

    Args:
        quote: what it is in: "", a quotation mark, or "<" for a here-document.
        literal: extended by the names of placeholders where the shell replaces nothing.
    """
    outer: list[tuple[str, str]] = []  # what each open bracket or backquote is, and is within
    documents: list[tuple[str, str]] = []  # << or <<- and the word, of those that a line begins
    done: list[str] = []
    at = 0
    while True:
        match = _TOKEN.search(text, at)
        if match is None:
            return "".join(done) + text[at:]
        done.append(text[at : match.start()])
        at = match.end()
        token, name = match[0], match["name"]
        if name in values:
            variable = f"${{hvd_{name}}}"
            token = {"": f'"{variable}"', "'": f"'\"{variable}\"'"}.get(quote, variable)
        elif quote == "'":
            # Between single quotes a backslash has no meaning.
            quote = "" if token[-1] == "'" else quote
        elif token in ("'", '"'):
            if token == quote:
                quote = ""
            elif not quote:
                quote = token
        elif token == "(" and (not quote or text[match.start() - 1] == "$"):
            outer.append((")", quote))
            quote = ""
        elif token == "`" and (not outer or outer[-1][0] != token):
            outer.append((token, quote))
            quote = ""
        elif outer and token == outer[-1][0] and not quote:
            quote = outer.pop()[1]
        elif token.startswith("<<") and not quote:
            word = _WORD.match(text, at)
            if word is not None:
                documents.append((token, word[1]))
        elif token == "\n" and not quote:
            for sign, word_text in documents:
                end = re.sub(r"""\\(.)|['"]""", r"\1", word_text)
                tabs = "\t*" if sign == "<<-" else ""
                body = re.compile(rf"(?:.*\n)*?{tabs}{re.escape(end)}(?:\n|\Z)").match(text, at)
                if body is None:  # it is a shift of a number
                    continue
                at = body.end()
                if end == word_text:
                    token += _fill(body[0], values, "<", literal)
                else:
                    token += body[0]
                    literal += [each["name"] for each in re.finditer(_NAME, body[0])]
            documents.clear()
        done.append(token)
