"""ddtreectl, also ``kubectl ddtree``: runs a verb and turns whatever happens into an exit code and one sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddtreectl.exits import CliError, Exit


def run(args: Sequence[str] | None = None, program: str = "ddtreectl") -> int:
    """Run the command line and return its exit code. Never raises for what a user can do wrong."""
    try:
        code = _run(args, program)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as with | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    return code


def _run(args: Sequence[str] | None, program: str) -> int:
    import typer

    from ddtreectl.app import build

    try:
        code = typer.main.get_command(build()).main(args=args, prog_name=program, standalone_mode=False)
    except CliError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.code
    except typer.TyperException as exc:  # usage; click's own code for it, 2, means something else here
        message = exc.format_message().replace("Value error, ", "")
        if type(exc).__name__ == "NoArgsIsHelpError":
            print(message)
            return Exit.DONE
        print(f"error: {message[:1].lower()}{message[1:].rstrip('.')}; see {program} --help", file=sys.stderr)
        return Exit.ERROR
    except (KeyboardInterrupt, typer.Abort):
        return Exit.INTERRUPTED
    return int(code or 0)


def main() -> None:
    """Entry point of both scripts."""
    program = "kubectl ddtree" if Path(sys.argv[0]).name.startswith("kubectl-ddtree") else "ddtreectl"
    sys.exit(run(program=program))


if __name__ == "__main__":
    main()
