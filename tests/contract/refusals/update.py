"""Write the errors that the calls in these files raise today. Review the difference with git.

    .venv/bin/python tests/contract/refusals/update.py tests/contract/refusals/call.txt

The files list invalid arguments of the public functions and classes of a package, each with its
error, in the form of an interactive session. `make test` compares them. For a new line only the
call is needed.
"""

import doctest
import sys
import traceback
import warnings
from pathlib import Path
from textwrap import indent

SESSION = doctest.DocTestParser()


def error_of(source: str, names: dict[str, object]) -> str:
    """Run a statement; return its error, or an empty string."""
    try:
        exec(compile(source, "refusals", "single"), names)
    except Exception as error:  # noqa: BLE001 - an expected one
        return "".join(traceback.format_exception_only(error))
    return ""


def updated(text: str) -> str:
    """The text of a file with the errors of today."""
    parts, names = [], {}
    for part in SESSION.parse(text):
        if isinstance(part, str):
            parts.append(part)
            continue
        first, *more = part.source.splitlines()
        parts.append(f">>> {first}\n" + indent("\n".join([*more, ""]), "... ", bool))
        parts.append(error_of(part.source, names))
    return "".join(parts)


if __name__ == "__main__":
    warnings.simplefilter("error")  # as in the tests
    for name in sys.argv[1:]:
        Path(name).write_text(updated(Path(name).read_text()))
