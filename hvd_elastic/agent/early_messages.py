"""Leaves out of a worker's log what TensorFlow prints though its level of messages forbids it.

``TF_CPP_MIN_LOG_LEVEL`` is read while a library of TensorFlow is loaded, after other parts of the
same library (oneDNN's) have printed messages: no value of the variable keeps these back.
"""

from __future__ import annotations

import re

_KINDS = "IWE"
"""First letters of messages with information, warnings and errors, in the order of the levels."""
_MESSAGE = (
    r"^(?:WARNING: All log messages before absl::InitializeLog\(\) .*"
    r"|[%s]0000 00:00:\d+\.\d+ +\d+ \S+:\d+\] .*)\n"
)


def without_early_messages(data: bytes, level: str) -> bytes:
    r"""Return the output of a worker that starts, without messages of TensorFlow below a level.

    Args:
        data: some of the output. A message is whole in it, since it is written at once.
        level: value of ``TF_CPP_MIN_LOG_LEVEL``: number of kinds that are not wanted.

    >>> early = b"I0000 00:00:17956.49  22540 port.cc:153] oneDNN custom operations are on.\n"
    >>> without_early_messages(early + b"step 1\n", "2")
    b'step 1\n'
    >>> without_early_messages(early, "0") == early
    True
    """
    unwanted = _KINDS[: int(level)] if level.isdecimal() else ""
    if not unwanted:
        return data
    return re.sub((_MESSAGE % unwanted).encode(), b"", data, flags=re.MULTILINE)
