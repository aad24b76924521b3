"""Places that are URLs: what they are, and their file system by fsspec."""

from __future__ import annotations

from typing import Any

from hvd_elastic.errors import HvdElasticError


def is_url(place: object) -> bool:
    """Return whether a place is a URL instead of a folder.

    >>> is_url("s3://bucket/run"), is_url("/data/run")
    (True, False)
    """
    return "://" in str(place)


def file_system(url: str, named: str, kind: type[HvdElasticError]) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path there.

    Args:
        url: any URL that fsspec supports.
        named: what needs it, for the message.

    Raises:
        HvdElasticError: fsspec is not installed.
        ImportError: the package for this kind of URL is not installed; the message names it.
    """
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise kind(
            f"{named} needs the package fsspec, which is not installed: pip install fsspec"
        ) from error
    files, path = fsspec.core.url_to_fs(url)
    return files, path
