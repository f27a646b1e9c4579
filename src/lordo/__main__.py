"""`python -m lordo` is `lordo`; torchrun starts it so."""

import sys

from lordo.cli import main

if __name__ == "__main__":
    sys.exit(main())
