"""`python -m distckpt`: see `distckpt.cli`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from distckpt.cli import main

        status = main()
    except KeyboardInterrupt:
        # While it was starting.
        status = 130
    sys.exit(status)
