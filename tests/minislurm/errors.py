"""The errors of the test bed. Their text is meant to be read by a person without a traceback."""

from __future__ import annotations

from pathlib import Path


class BedError(Exception):
    """Something in the test bed failed; the text says what was tried and shows the end of its log."""


class BadInput(BedError):
    """What was asked for makes no sense; the text is one line."""


class Unsupported(BedError):
    """This machine cannot do it; the text is one line: what is missing and how to get it."""


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, indented, for an error message."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return f"  (no log at {path})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or f"  ({path} is empty)"
