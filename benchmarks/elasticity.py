"""``hvd-elastic bench elasticity`` from a checkout; see README.md here."""

from hvd_elastic.cli.app import main

if __name__ == "__main__":
    import sys

    main(["bench", "elasticity", *sys.argv[1:]])
