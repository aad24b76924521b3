"""``hvd-elastic bench startup`` from a checkout; see README.md here."""

from hvd_elastic.cli.app import main

if __name__ == "__main__":
    import sys

    main(["bench", "startup", *sys.argv[1:]])
