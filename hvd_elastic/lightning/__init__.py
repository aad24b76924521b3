"""Lightning, elastic: the strategy for a ``Trainer``.

Outline of a script::

    import lightning as L
    from hvd_elastic.lightning import ElasticStrategy

    trainer = L.Trainer(strategy=ElasticStrategy(), max_epochs=10)
    trainer.fit(model, datamodule)
"""

from __future__ import annotations

from hvd_elastic.lightning.library import check_version

check_version()

from hvd_elastic.lightning.strategy import ElasticStrategy

__all__ = ["ElasticStrategy"]
