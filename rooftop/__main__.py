"""The ``rooftop`` command, and ``python -m rooftop``."""

from __future__ import annotations

import sys


def main() -> None:
    """Import the command line and run it. Ctrl-C during the import is one line as well."""
    try:
        from rooftop.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("rooftop: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
