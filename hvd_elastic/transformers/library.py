"""Checks before Hugging Face's libraries are imported: their releases, and one GPU."""

from __future__ import annotations

import logging
import os

import torch

import hvd_elastic.torch as hvd
from hvd_elastic.errors import ScriptError
from hvd_elastic.frameworks import (
    TRANSFORMERS_REQUIREMENTS,
    install_command,
    version_of,
    why_no_transformers,
)
from hvd_elastic.worker import context, launch

_HUB = logging.getLogger("huggingface_hub.utils._http")
_OFFLINE = (
    "If this host has no network, set HF_HUB_OFFLINE=1: what is on its disk is used, and a name of "
    "which nothing is there fails at once. Or give the path of a folder in place of the name."
)


def check_versions() -> None:
    """Raise ScriptError if a library is missing, or of a release whose Trainer is not known."""
    why = why_no_transformers(version_of("transformers"), version_of("accelerate"))
    if why is not None:
        raise ScriptError(f"{why}; run: {install_command(*TRANSFORMERS_REQUIREMENTS)}")
    _HUB.addFilter(_say_how_to_stay_offline)  # it tries for half a minute to reach one


def _say_how_to_stay_offline(record: logging.LogRecord) -> bool:
    """Have a first try that has failed say, to the leader too, what to do without a network."""
    if "[Retry 1/" in (said := record.getMessage()):
        _HUB.removeFilter(_say_how_to_stay_offline)
        record.msg, record.args = f"{said} {_OFFLINE}", ()
        if launch.detect_mode(os.environ) is launch.Mode.AGENT and launch.local_rank() == 0:
            hvd.init()
            context.current().worker.warn(f"the hub of models cannot be reached. {_OFFLINE}")
    return True


def see_own_gpu() -> None:
    """Have this process see the GPU of its slot alone, since Trainer uses all that it sees.

    Raises:
        ScriptError: the GPUs are in use already.
    """
    if not torch.cuda.is_available() or torch.cuda.device_count() == 1:
        return
    if torch.cuda.is_initialized():
        raise ScriptError(
            "hvd_elastic.transformers is imported after the script has used a GPU. A worker has "
            "one, and Trainer would spread its model over all "
            f"{torch.cuda.device_count()} of this host: import it at the beginning of the script"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = (
        visible.split(",") if visible else [str(each) for each in range(torch.cuda.device_count())]
    )
    slot = launch.local_rank()
    if slot < len(devices):  # else hvd.init() says that the slot has none
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[slot].strip()
