"""What the programs of the project share: python -m qkv_ext, the bench and the examples.

They print in any encoding, say what is wrong with an argument in one line, and end without a
traceback at ^C and where nobody reads their output any more.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from qkv_ext._core._text import SPELLED

INTERRUPTED, NO_READER = 128 + 2, 128 + 13  #: as a shell reports SIGINT and SIGPIPE
_Number = TypeVar("_Number", int, float)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line: the usage is for --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see --help)\n")


def number(
    kind: type[_Number], least: _Number, most: _Number | None = None
) -> Callable[[str], _Number]:
    """The type of an argument that is an int or a float within limits, for add_argument."""
    expected = "an integer" if kind is int else "a number"
    expected += f" of at least {least}" if most is None else f" from {least} to {most}"

    def parse(text: str) -> _Number:
        with contextlib.suppress(ValueError, OverflowError):
            value = kind(text)
            if least <= value and value <= (sys.maxsize if most is None else most):
                return value
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise argparse.ArgumentTypeError(f"expected {expected}; got {shown!r}")

    return parse


def one_line(error: BaseException) -> str:
    """What an exception says, whatever its length and lines, with its name where that is needed."""
    said = " ".join(str(error).split())
    if not said or isinstance(error, LookupError):
        said = f"{type(error).__name__} {said}".strip()
    return said if len(said) <= 300 else f"{said[:300]}..."


def run(main: Callable[[], Any]) -> NoReturn:
    """Call main and exit with what it returns; at the end of a file: if __name__ == "__main__"."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    for stream in streams:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure and stream.errors in ("strict", "surrogateescape"):
            reconfigure(errors=SPELLED)
    status: Any
    try:
        try:
            status = main()
        except SystemExit as end:
            status = end.code
        for stream in streams:
            stream.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except (OSError, MemoryError) as error:
        status = _failed(error)
    for stream in streams:
        _empty(stream)
    sys.exit(status)


def _failed(error: OSError | MemoryError) -> int:
    """The status of a program that cannot go on, said in one line if anybody reads it."""
    broken = (errno.EPIPE, errno.EINVAL) if os.name == "nt" else (errno.EPIPE,)
    if isinstance(error, OSError) and error.errno in broken:
        return NO_READER
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    with contextlib.suppress(OSError):
        print(f"{name}: {one_line(error)}", file=sys.stderr)
    return 1


def _empty(stream: Any) -> None:
    """Leave nothing that the interpreter would fail to write at its end, and complain of."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
