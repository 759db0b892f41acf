"""`python -m coordinator`: the command line, where the command `weight-cache` is not installed."""

from coordinator.cli import main

if __name__ == "__main__":
    main()
