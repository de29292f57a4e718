"""`python -m gangrun` is `gangrun`."""

from gangrun.cli import main

main()
