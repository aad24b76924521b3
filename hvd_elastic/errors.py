"""Define the errors that a user can get, as one class hierarchy.

    HvdElasticError
    ├── UsageError             wrong flags or arguments (exit status 2)
    │   └── ArgumentError          wrong arguments of a function; also a ValueError
    ├── SeveralErrors          several errors, found at the same time
    ├── HostfileError          a line of a hostfile cannot be read
    ├── SshError               a host cannot be used over ssh
    │   ├── HostUnreachableError   no connection
    │   │   └── HostUnknownError   no such name
    │   ├── HostKeyError           unknown or changed host key
    │   └── LoginRefusedError      no key, or not the right one
    ├── StrangerError          a file, folder or socket belongs to another user
    ├── RunError               a run cannot start, be found or continue; also a RuntimeError
    ├── ScriptError            the user's training script is used in a way that cannot work
    ├── CheckpointError        a checkpoint cannot be written or read
    ├── DataError              a dataset cannot be prepared, indexed or read
    │   └── SkippedExampleError    an example cannot be decoded, and is to be left out
    ├── VirtualClusterError    a virtual cluster cannot be made or found
    └── BuildError             Horovod cannot be built or installed

Every message says what was wrong, where, what is valid and what to do next; the command line
prints it without a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class HvdElasticError(Exception):
    """Base class of all errors that the user can fix.

    Attributes:
        exit_status: exit status of a command that ends with the error.
    """

    exit_status = 1


class UsageError(HvdElasticError):
    """Wrong flags or arguments."""

    exit_status = 2


class ArgumentError(UsageError, ValueError):
    """Wrong arguments of a function or class; a ValueError, as Python's own classes raise it.

    :class:`UsageError` is none, since typer replaces the message of a ValueError by its own.
    """


class SeveralErrors(HvdElasticError):  # noqa: N818  # the plural says what it is
    """Several errors that were found at the same time."""

    def __init__(self, errors: Sequence[HvdElasticError]) -> None:
        # The command line puts the first "error: " before it.
        super().__init__("\nerror: ".join(map(str, errors)))
        self.exit_status = max(error.exit_status for error in errors)


def raise_together(*checks: Callable[[], None]) -> None:
    """Run all checks, and raise one error that names all mistakes."""
    found: list[HvdElasticError] = []
    for check in checks:
        try:
            check()
        except HvdElasticError as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        raise SeveralErrors(found)


class HostfileError(HvdElasticError):
    """A hostfile cannot be read; the message names path, line and text."""


class SshError(HvdElasticError):
    """A host cannot be used over ssh.

    Attributes:
        brief: predicate of a sentence whose subject is one host or several.
    """

    brief = "cannot be used over ssh"


class HostUnreachableError(SshError):
    """No connection to a host."""

    brief = "cannot be reached"


class HostUnknownError(HostUnreachableError):
    """The name of a host cannot be looked up."""

    brief = "cannot be looked up"


class HostKeyError(SshError):
    """The host key is unknown or has changed."""

    brief = "cannot be trusted"


class LoginRefusedError(SshError):
    """A host does not let the user in."""

    brief = "cannot be logged in to"


class StrangerError(HvdElasticError):
    """A file, folder or socket belongs to another user, or others may change it."""


class RunError(HvdElasticError, RuntimeError):
    """A run cannot start, be found or continue."""


class ScriptError(HvdElasticError):
    """The training script uses the library in a way that cannot work."""


class CheckpointError(HvdElasticError):
    """A checkpoint cannot be written or read."""


class DataError(HvdElasticError):
    """A dataset cannot be prepared, indexed or read; the message names file and example."""


class SkippedExampleError(DataError):
    """An example cannot be decoded, and the loader is to leave it out of its batch.

    Attributes:
        example: which one: its shard and key.
        reason: why it cannot be decoded.
    """

    def __init__(self, example: str, reason: str = "") -> None:
        # PyTorch makes it again, of its text alone, in the process that asked for the example.
        super().__init__(f"{example} cannot be decoded: {reason}" if reason else example)
        self.example, self.reason = example, reason


class VirtualClusterError(HvdElasticError):
    """A virtual cluster cannot be made, found or changed."""


class BuildError(HvdElasticError):
    """Horovod cannot be built or installed."""
