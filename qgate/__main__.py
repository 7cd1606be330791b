"""`python -m qgate` is the `qgate` command."""

from qgate.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
