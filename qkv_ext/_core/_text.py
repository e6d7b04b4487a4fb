"""Text for whatever it is written to: what an encoding cannot say is spelled in ASCII."""

from __future__ import annotations

import codecs
from typing import TextIO

SPELLED = "qkv_ext.spelled"  #: the name of the error handler, for errors= of a stream
_NAMES = {"ᵀ": "^T", "√": "sqrt ", "·": "*", "›": ">", "\ufffd": "?"}


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    escaped = (_NAMES.get(c) or c.encode("ascii", "backslashreplace").decode() for c in letters)
    return "".join(escaped), error.end


codecs.register_error(SPELLED, _spell)


def printable(text: str, file: TextIO) -> str:
    """The text as the file's encoding can say it; a file that has none holds any text."""
    try:
        encoding = file.encoding
        return text.encode(encoding, SPELLED).decode(encoding)
    except (AttributeError, TypeError, LookupError):  # io.StringIO has None, others have none
        return text
