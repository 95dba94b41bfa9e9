"""`python -m mobatlas`."""

from mobatlas.cli import main

main()
