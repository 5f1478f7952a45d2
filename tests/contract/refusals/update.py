"""Write the errors that the calls in these files raise today. Review the difference with git.

    .venv/bin/python tests/contract/refusals/update.py tests/contract/refusals/call.txt

The files list invalid arguments of the public functions and classes of a package, each with its
error, in the format of doctest. `make test` compares them. For a new line only the call is needed.
"""

import doctest
import sys
import traceback
import warnings
from pathlib import Path
from textwrap import indent


def updated(text: str) -> str:
    """The text of a file with the errors of today."""
    parts, names = [], {}
    for part in doctest.DocTestParser().parse(text):
        if isinstance(part, str):
            parts.append(part)
            continue
        first, *more = part.source.splitlines()
        parts.append(f">>> {first}\n" + indent("\n".join([*more, ""]), "... ", bool))
        try:
            exec(compile(part.source, "refusals", "single"), names)
        except Exception as error:  # noqa: BLE001 - an expected one
            last = traceback.format_exception_only(error)
            parts += ["Traceback (most recent call last):\n", *last]
    return "".join(parts)


if __name__ == "__main__":
    warnings.simplefilter("error")  # as in the tests
    for name in sys.argv[1:]:
        Path(name).write_text(updated(Path(name).read_text()))
