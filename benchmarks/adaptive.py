"""What a batch that adapts knows of the noise, and what that costs; see README.md here.

Run it: ``python benchmarks/adaptive.py --out benchmarks/results/adaptive.json``.
"""

from hvd_elastic.bench.adaptive.measure import main

if __name__ == "__main__":
    main()
