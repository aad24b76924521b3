"""Mathematics of training, no I/O: step time, goodput, noise scale, shares, who reads what."""
