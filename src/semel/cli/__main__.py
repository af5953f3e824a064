"""`python -m semel.cli` is `semel`."""

from semel.cli import main

main()
