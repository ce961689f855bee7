"""`python -m serve`: the same command line as `nanoserve`, for a checkout with nothing installed."""

import sys

from serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
