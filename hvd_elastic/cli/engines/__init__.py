"""Commands that submit runs to whoever owns the machines."""

from __future__ import annotations

import time


def tell(engine: str, text: str) -> None:
    """Print what is done for a run into the output of its leader, with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {engine}: {text}", flush=True)
