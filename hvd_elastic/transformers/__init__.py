"""Hugging Face's Trainer, elastic.

Outline of a script::

    from transformers import TrainingArguments
    from hvd_elastic.transformers import Trainer

    trainer = Trainer(model=model, args=TrainingArguments("out"), train_dataset=data)
    trainer.train()

Any subclass of theirs becomes elastic by :func:`elastic`::

    from trl import SFTTrainer
    from hvd_elastic.transformers import elastic

    trainer = elastic(SFTTrainer)(model=model, train_dataset=data)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_elastic.transformers.library import check_versions, see_own_gpu

check_versions()

from hvd_elastic.transformers import trainer as _trainer

if TYPE_CHECKING:
    from hvd_elastic.transformers.trainer import Trainer, elastic

__all__ = ["Trainer", "elastic"]


def __getattr__(name: str) -> Any:
    """Return what the script imports; a worker may have been forked with this module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    see_own_gpu()
    return getattr(_trainer, name)
