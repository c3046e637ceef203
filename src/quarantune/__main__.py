"""`python -m quarantune` is the command `quarantune`."""

import sys

from quarantune.cli.entry_point import main

if __name__ == "__main__":
    sys.exit(main())
