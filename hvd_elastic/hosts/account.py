"""The account that logs in to hosts, and whether its login shell runs what it is sent."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

_REFUSING = ("nologin", "false")
_PLAIN_SHELL = "/bin/sh"


def why_no_commands(account: pwd.struct_passwd) -> str | None:
    """Why sshd runs nothing for this user, whose login shell is given every command; or None."""
    shell = account.pw_shell or _PLAIN_SHELL
    if Path(shell).name in _REFUSING:
        return f"user {account.pw_name} has the login shell {shell}, so sshd runs nothing for it"
    if not os.access(shell, os.X_OK):
        return f"user {account.pw_name} has the login shell {shell}, which is not there"
    return None


def how_to_mend_shell(account: pwd.struct_passwd) -> str:
    """The command that gives the user a shell; a user without one cannot do it alone."""
    return f"as root: usermod --shell /bin/bash {account.pw_name}"


def command_shell(account: pwd.struct_passwd) -> str:
    """The shell for commands on this machine, where no sshd insists on the account's own."""
    return _PLAIN_SHELL if why_no_commands(account) else account.pw_shell or _PLAIN_SHELL
