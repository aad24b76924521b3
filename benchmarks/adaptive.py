"""What a batch that adapts knows, what that costs and what it brings; see README.md here.

Run it: ``python benchmarks/adaptive.py --out benchmarks/results``.
"""

from hvd_elastic.bench.adaptive.measure import main

if __name__ == "__main__":
    main()
