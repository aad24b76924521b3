"""What only a user's own processes know of jobs on a cluster of another user's daemon."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from hvd_elastic.config import runs_folder
from hvd_elastic.errors import RunError
from hvd_elastic.jobs.job import JobRequest
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.json_text import parse_json
from hvd_elastic.own_files import private_folder
from hvd_elastic.records.run_folder import RunFolder, check_run_id
from hvd_elastic.replaced_files import write_whole

INDEX_VARIABLE = "HVD_ELASTIC_ARRAY_INDEX"
"""Environment variable with the index of a job in its array."""
_SIZES = ("min_np", "np", "max_np", "plain", "policy")
"""Fields of a specification that a daemon of another user decides."""
_SUBMITTING_S = 120.0
"""Longest time from the writing of a job's file to its place in the queue [s]."""


def shown_words(request: JobRequest) -> list[str]:
    """Return what others see of a job's command: its first word, of a private job nothing."""
    return [] if request.private else request.words[:1]


class ToldSpec(msgspec.Struct):
    """What such a daemon is told of a specification, beside the command's first word."""

    input_hosts: list[str] = []
    python: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    leader_grace_s: Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)] = 60.0


class JobSecrets:
    """The files of this user's jobs, each with the specification and the environment of one."""

    def __init__(self, place: ClusterFolder) -> None:
        self._folder = place.keeper / "jobs"
        self._cluster = place.path.resolve().name

    def keep(self, request: JobRequest, environment: Mapping[str, str]) -> JobRequest:
        """Write what the daemon is not to know; return what is said to it.

        Raises:
            RunError: the file cannot be written.
        """
        name = request.secret or secrets.token_hex(8)
        self.write(name, request.spec, environment)
        told = {"command": shown_words(request)}
        fields = ToldSpec.__struct_fields__
        told |= {key: request.spec[key] for key in fields if key in request.spec}
        if request.private:
            told.pop("python", None)
        return replace(request, spec=told, secret=name)

    def write(self, name: str, spec: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Write the file of a job.

        Raises:
            RunError: it cannot be written.
        """
        content = {"spec": spec, "environment": dict(environment)}
        try:
            private_folder(self._folder.parent)
            private_folder(self._folder)
            write_whole(self._folder / name, json.dumps(content, default=str), mode=0o600)
        except OSError as error:
            raise RunError(f"cannot write {self._folder / name}: {error.strerror}") from error

    def read(self, name: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return specification and environment of a job.

        Raises:
            RunError: they cannot be read.
        """
        path = self._folder / Path(name).name
        try:
            found = parse_json(path.read_bytes())
            return dict(found["spec"]), dict(found["environment"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"what to run cannot be read from {path} ({error}). Submit the job again"
            ) from error

    def complete(
        self, name: str, fields: Mapping[str, Any], environment: Mapping[str, str]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return specification and environment of a run; the daemon decides its sizes alone.

        Args:
            fields, environment: what the daemon says of them.

        Raises:
            RunError: they cannot be read.
        """
        own, variables = self.read(name)
        sizes = {key: fields[key] for key in _SIZES if key in fields}
        index = {key: environment[key] for key in [INDEX_VARIABLE] if key in environment}
        return {**own, **sizes}, {**variables, **index}

    def allows(self, run_id: str) -> bool:
        """Return whether a run is a job of this cluster, or there is none of that name yet."""
        folder = RunFolder(runs_folder() / check_run_id(run_id))
        told = folder.read_run()
        return not folder.path.exists() or (told.get("cluster") == self._cluster and "job" in told)

    def forget_environments(self) -> None:
        """Drop the environments of all jobs, which have ended; a requeue brings new ones."""
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError, RunError):
                if time.time() - path.stat().st_mtime > _SUBMITTING_S:  # else it may be a new one
                    self.write(path.name, self.read(path.name)[0], {})
