"""`python -m kvsweep` is the command line."""

from kvsweep.cli import app

app()
