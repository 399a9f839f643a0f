"""What all commands do alike: options, console, exit codes, one line an error and never a traceback."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bidirl import __version__
from bidirl.errors import BidirlError, RunFault

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["INTERRUPTED", "JobArgument", "JsonOption", "SetOption", "console", "guarded", "root"]

JobArgument = Annotated[Path, typer.Argument(help="Job file (TOML) or a resolved.json.", show_default=False)]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the job; repeatable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]

PIPE_WIDTH = 120
"""Columns of tables that do not go to a terminal, unless COLUMNS says otherwise."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bidirl {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hold the options that stand before a command."""


def console(*, stderr: bool = False) -> "Console":
    """Return a console that keeps tables readable in a pipe and lets a closed pipe be noticed."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Plain(stderr=stderr, width=width)


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
