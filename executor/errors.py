"""The few errors a person can meet. The text says what was tried, with which value, and what to do."""

from executor import protocol


class ExecutorError(Exception):
    """Something around the script failed, not the script."""

    exit_code = protocol.EXIT_INFRASTRUCTURE


class UsageError(ExecutorError):
    """A flag or a value that was given is not usable; nothing was started."""

    exit_code = protocol.EXIT_USAGE


class SpecError(UsageError, ValueError):
    """A field of a job description has a value that is not allowed. The text names the field, the value, what is."""
