"""What all commands do alike: exit codes, one line an error, no traceback for what a user did."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from bidirl.errors import BidirlError, RunFault

__all__ = ["INTERRUPTED", "guarded"]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def guarded(command: Callable[..., Any], arguments: Sequence[str], name: str = "bidirl") -> int:
    """Run a typer app under ``name`` and return its exit code; whatever goes wrong is said on stderr."""
    try:
        code = command(args=arguments, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BidirlError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`). Point stdout elsewhere, or Python complains when it flushes at exit.
        _close_stdout()
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{where}{(error.strerror or str(error)).lower()}: choose another place", file=sys.stderr)  # noqa: T201
        _close_stdout()
        return RunFault.exit_code
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a mistake in the options
            path = getattr(getattr(error, "ctx", None), "command_path", name)
            message = str(error.format_message()).rstrip(".").replace("\n", " ")
            print(f"{path}: {message}: see {path} --help", file=sys.stderr)  # noqa: T201
            return int(error.exit_code)
        traceback.print_exc()
        print("this is a bug in bidirl: please report it with the lines above", file=sys.stderr)  # noqa: T201
        return RunFault.exit_code


def _close_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
