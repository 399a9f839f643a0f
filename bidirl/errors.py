"""The errors that a user can meet, each with the exit code that the command line returns.

A message is one line: the value, the rule, the remedy.
"""

__all__ = ["BidirlError", "InputError", "InvariantBroken", "NoFeasiblePlan", "RunFault", "first_line"]


class BidirlError(Exception):
    """Root of every error raised on purpose; ``exit_code`` is what the command returns."""

    exit_code = 3


class InputError(BidirlError):
    """Bad input: a file, a value or an option that breaks a rule."""

    exit_code = 2


class NoFeasiblePlan(BidirlError):
    """The question has no feasible answer; the message names the binding constraint."""

    exit_code = 1


class RunFault(BidirlError):
    """Something failed while running; what was computed before is kept."""


class InvariantBroken(BidirlError):
    """A state that must never occur; the message tells the story of the object."""


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
