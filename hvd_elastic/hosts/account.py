"""Check whether an account's login shell runs commands that are sent over ssh."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

# Names of login shells that refuse to run commands.
_REFUSING = ("nologin", "false")
_PLAIN_SHELL = "/bin/sh"


def why_no_commands(account: pwd.struct_passwd) -> str | None:
    """Return why sshd cannot run commands in this user's login shell; None if it can."""
    shell = account.pw_shell or _PLAIN_SHELL
    if Path(shell).name in _REFUSING:
        return f"user {account.pw_name} has the login shell {shell}, so sshd runs nothing for it"
    if not os.access(shell, os.X_OK):
        return f"user {account.pw_name} has the login shell {shell}, which is not there"
    return None


def how_to_mend_shell(account: pwd.struct_passwd) -> str:
    """Return the command by which root gives the user a login shell."""
    return f"as root: usermod --shell /bin/bash {account.pw_name}"


def command_shell(account: pwd.struct_passwd) -> str:
    """Return the shell for commands on this machine: the login shell if usable, or /bin/sh."""
    return _PLAIN_SHELL if why_no_commands(account) else account.pw_shell or _PLAIN_SHELL
