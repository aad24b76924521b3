"""Stores checkpoints at a URL that fsspec supports: ``s3://…``, ``gs://…``, ``memory://…``.

Checkpoints are assembled in the run folder and uploaded when complete, the manifest last. Object
stores list an object only once it is complete, so a listed checkpoint is complete too.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvd_elastic.checkpoint.manifests import (
    MANIFEST,
    CheckpointInfo,
    OnSkip,
    complete_checkpoint,
    is_outdated,
    is_own,
    parse_manifest,
    why_passed_over,
)
from hvd_elastic.checkpoint.shards import SHARD, receive_shard
from hvd_elastic.checkpoint.whole_files import DamagedFileError, HashingWriter
from hvd_elastic.errors import CheckpointError
from hvd_elastic.json_text import parse_json
from hvd_elastic.urls import file_system

_CHUNK_BYTES = 4 << 20  # per read of a download; large enough to make requests cheap


class CheckpointUrl:
    """A folder of checkpoints that is accessed through fsspec.

    Raises:
        CheckpointError: fsspec or its backend for this URL is not installed; the message names
            the package.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with self._explained("used"):
            named = f"--checkpoint-dir {url}"
            self._files, self._root = file_system(self.url, named, CheckpointError)

    def __str__(self) -> str:
        return self.url

    def check(self) -> None:
        """Check that the URL can be written, before training starts.

        Raises:
            CheckpointError: it cannot be written.
        """
        probe = f"{self._root}/.tmp-hvd_elastic"
        with self._explained("written"):
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(probe, b"hvd_elastic")
            self._files.rm_file(probe)

    def read_file(self, name: str) -> bytes:
        """Return the content of a small file; empty if there is no such file.

        Raises:
            CheckpointError: it cannot be read.
        """
        with self._explained("read"):
            try:
                return bytes(self._files.cat_file(f"{self._root}/{name}"))
            except FileNotFoundError:
                return b""

    def write_file(self, name: str, data: bytes) -> None:
        """Create or replace a small file.

        Raises:
            CheckpointError: it cannot be written.
        """
        with self._explained("written"):
            self._files.pipe_file(f"{self._root}/{name}", data)

    def remove_file(self, name: str) -> None:
        """Remove an existing file.

        Raises:
            CheckpointError: it cannot be removed.
        """
        with self._explained("tidied up"):
            self._files.rm_file(f"{self._root}/{name}")

    def upload(self, info: CheckpointInfo, keep: int, on_progress: Callable[[], None]) -> None:
        """Upload a checkpoint, then remove those that are no longer needed.

        Args:
            keep: number of checkpoints to keep.
            on_progress: called for each file and, where the file system tells, each part of it.

        Raises:
            CheckpointError: it cannot be written.
        """
        from fsspec.callbacks import Callback

        with self._explained("written"):
            self._files.makedirs(self._root, exist_ok=True)
            parts = Callback(hooks={"parts": lambda *_, **__: on_progress()})
            for path in info.files:
                on_progress()
                self._files.put_file(str(path), f"{self._root}/{path.name}", callback=parts)
        with self._explained("tidied up"):
            names = self._names()
            outdated = is_outdated(self.find(Path()), keep, info)
            for pattern in (MANIFEST, SHARD):  # no manifest may ever name missing shards
                for name in names:
                    match = pattern.fullmatch(name)
                    if match and outdated(int(match[1])):
                        self._files.rm_file(f"{self._root}/{name}")

    def find(self, folder: Path) -> list[CheckpointInfo]:
        """Return the checkpoints, newest first, with paths in ``folder``; nothing is verified.

        Raises:
            CheckpointError: the URL cannot be read.
        """
        found = []
        for _, name in self._manifests():
            with contextlib.suppress(ValueError):
                found.append(self._read_manifest(name, folder))
        return found

    def download_newest(
        self, folder: Path, keep: int, newer_than: int, on_skip: OnSkip, run_id: str
    ) -> CheckpointInfo | None:
        """Download the newest valid checkpoint to ``folder``; return None if there is none.

        Args:
            keep: number of checkpoints to keep in ``folder``.
            newer_than: only checkpoints of later steps than this are considered; -1: all, and one
                with weights that are not finite if no other is valid.
            on_skip: called with (path, why) for each newer one that cannot be used.
            run_id: run whose checkpoints are searched.

        Raises:
            CheckpointError: the URL cannot be read, or the folder cannot be written; or none is
                valid, and one that cannot be downloaded now might be.
        """
        trouble: CheckpointError | None = None
        names = [name for step, name in self._manifests() if step > newer_than]
        not_finite: set[str] = set()
        for name in names:  # grows in the loop
            try:
                info = self._read_manifest(name, folder)
                if not is_own(info, run_id):
                    raise ValueError(f"it is of run {info.run}")
                if info.not_finite and name not in not_finite:
                    not_finite.add(name)
                    names += [name] * (newer_than < 0)
                    raise ValueError(why_passed_over(info))
                shards = [receive_shard(folder, s, self._reading(s.file)) for s in info.shards]
            except (DamagedFileError, ValueError) as error:
                on_skip(Path(name), str(error))
            except CheckpointError as error:
                on_skip(Path(name), str(error))
                if not isinstance(error.__cause__, FileNotFoundError):
                    trouble = trouble or error
            else:
                return complete_checkpoint(folder, shards, keep)
        if trouble is not None:
            raise trouble
        return None

    def _manifests(self) -> list[tuple[int, str]]:
        """Return (step, name) of each manifest, newest first."""
        with self._explained("read"):
            names = self._names()
        return sorted(((int(m[1]), n) for n in names if (m := MANIFEST.fullmatch(n))), reverse=True)

    def _read_manifest(self, name: str, folder: Path) -> CheckpointInfo:
        with self._explained("read"):
            manifest = self._files.cat_file(f"{self._root}/{name}")
        return parse_manifest(parse_json(manifest), folder)

    def _reading(self, name: str) -> Any:
        def copy(writer: HashingWriter) -> None:
            with self._explained("read"), self._files.open(f"{self._root}/{name}", "rb") as file:
                shutil.copyfileobj(file, writer, _CHUNK_BYTES)

        return copy

    def _names(self) -> list[str]:
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return []
        return [path.rsplit("/", 1)[-1] for path in self._files.ls(self._root, detail=False)]

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except ImportError as error:
            # The message of fsspec names the package, as in "Install s3fs to access S3".
            raise CheckpointError(
                f"--checkpoint-dir {self.url} needs a package that is not installed: {error}"
            ) from error
        except Exception as error:  # every backend raises exceptions of its own
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            raise CheckpointError(f"checkpoints at {self.url} cannot be {what}: {said}") from error
