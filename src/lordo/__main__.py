"""`python -m lordo` is `lordo`; torchrun starts it so."""

from lordo.cli import entry

if __name__ == "__main__":
    entry()
