"""Reads files of a folder behind a URL: HTTP by the standard library, other kinds by fsspec."""

from __future__ import annotations

import base64
import random
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from hvd_elastic.errors import DataError
from hvd_elastic.urls import file_system, is_url

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 60.0
"""How long a connection may give no data."""
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between attempts; each is drawn from half of its length up, so that the processes of a
cluster do not all come back at the same moment."""
_TRANSIENT = {408, 425, 429, *range(500, 600)}
"""Status codes of HTTP that another attempt may not get."""

WEB_PAGE = "check the URL, and whether the server wants a login"

Taken = TypeVar("Taken")


def selection(place: object) -> tuple[str, list[str] | None]:
    """Return the folder of a pattern with braces, and the names of files that it stands for.

    >>> selection("s3://bucket/train/{00..01}/{a,b}.tar")
    ('s3://bucket/train', ['00/a.tar', '00/b.tar', '01/a.tar', '01/b.tar'])
    >>> selection("/data/train")
    ('/data/train', None)
    """
    folder, slash, rest = str(place).partition("{")
    if not slash or (not is_url(place) and Path(str(place)).exists()):
        return str(place), None
    folder, _, begin = folder.rpartition("/")
    pattern, mark, query = (begin + slash + rest).partition("?")
    names = list(_expanded(pattern))
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{pattern} names {twice[0]} twice; name each shard once")
    return folder + mark + query, names


def _expanded(pattern: str) -> Iterator[str]:
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if found is None:
        if "{" in pattern or "}" in pattern:
            raise DataError(
                f"{pattern}: braces stand for numbers, {{000..127}}, or for names, {{train,val}}"
            )
        yield pattern
        return
    first, last, names = found.groups()
    parts = (
        names.split(",")
        if names is not None
        else [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    )
    if not parts:
        raise DataError(f"{pattern}: {first}..{last} counts down; write {last}..{first}")
    for part in parts:
        yield from _expanded(pattern[: found.start()] + part + pattern[found.end() :])


def refuse_web_page(begin: bytes, where: str) -> None:
    """Raise DataError if a file, of which these are the first bytes, is HTML; ``where`` it lies."""
    if begin.lstrip()[:5].lower() in (b"<html", b"<!doc", b"<?xml"):
        raise DataError(f"{where} is a web page; {WEB_PAGE}")


class RemoteFolder:
    """A folder behind a URL.

    Args:
        url: ``http(s)://…``, or any that fsspec supports. A query string (a signature) is sent with
            every file's URL. Messages leave it and passwords out.
    """

    def __init__(self, url: str) -> None:
        try:
            self._url = urlsplit(url)
        except ValueError as error:
            raise DataError(f"a URL is not valid: {error}") from None

    def __str__(self) -> str:
        return self._shown(self._url.path.rstrip("/"))

    def receive(self, name: str, take: Callable[[Iterator[bytes]], Taken]) -> Taken:
        """Return what ``take`` makes of the pieces of a file.

        ``take`` is called again when the server is overloaded or the connection fails. It raises
        ``IncompleteRead`` if the pieces are not what they should be.

        Raises:
            DataError: the file cannot be read, also after several attempts.
        """
        path = f"{self._url.path.rstrip('/')}/{name}"
        shown, why = self._shown(path), ""
        for pause_s in (*_PAUSES_S, None):
            try:
                with self._open(path) as file:
                    return take(_pieces(file))
            except DataError:
                raise
            except urllib.error.HTTPError as error:
                why = f"the server answers {error.code} {error.reason}"
                error.close()
                if error.code not in _TRANSIENT:
                    raise DataError(f"{shown}: {why}; {_advice(error.code)}") from None
            except ImportError as error:  # the message of fsspec names the package
                raise DataError(
                    f"{shown} needs a package that is not installed: {error}"
                ) from error
            except (FileNotFoundError, PermissionError) as error:
                code = 404 if isinstance(error, FileNotFoundError) else 403
                why = f"{_said(error)}; {_advice(code)}"
                raise DataError(f"{shown} cannot be read: {why}") from None
            except (OSError, HTTPException) as error:
                why = _said(error)
            except Exception as error:  # every backend of fsspec raises exceptions of its own
                raise DataError(f"{shown} cannot be read: {_said(error)}") from error
            if pause_s is not None:
                time.sleep(pause_s * random.uniform(0.5, 1))
        raise DataError(
            f"{shown} cannot be read ({len(_PAUSES_S) + 1} attempts): {why}; is the server up, and "
            "can this host reach it?"
        )

    def read(self, name: str) -> bytes:
        """Return the content of a small file; raises as :meth:`receive` does."""
        return self.receive(name, b"".join)

    def _open(self, path: str) -> Any:
        if self._url.scheme in ("http", "https"):
            user, at, host = self._url.netloc.rpartition("@")
            path = quote(path, safe="/%")
            url = urlunsplit(self._url._replace(netloc=host, path=path, fragment=""))
            request = urllib.request.Request(url)
            if at:
                encoded = base64.b64encode(unquote(user).encode()).decode()
                # Not sent on to another server.
                request.add_unredirected_header("Authorization", f"Basic {encoded}")
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        files, place = file_system(urlunsplit(self._url._replace(path=path)), str(self), DataError)
        return files.open(place, "rb")

    def _shown(self, path: str) -> str:
        host = self._url.netloc.rpartition("@")[2]
        return f"{self._url.scheme}://{host}{path}"


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(_CHUNK_BYTES):
        yield piece
    if missing := getattr(file, "length", None):  # of an HTTP response that was cut off
        raise IncompleteRead(b"", missing)


def _said(error: Exception) -> str:
    """Return the first line of a message, without query strings, which may hold secrets."""
    if isinstance(error, IncompleteRead):
        return "the connection was cut off"
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    line = str(reason).strip().partition("\n")[0] or type(error).__name__
    return re.sub(r"\?\S+", "?…", line)


def _advice(status: int) -> str:
    if status in (401, 403):
        return "check the credentials, and that the URL has not expired"
    return "check the URL; it names the folder that holds index.json and the shards"
