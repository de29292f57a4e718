"""`python -m gangrun` is `gangrun`."""

from __future__ import annotations

from gangrun.cli import main

main()
