"""Make what the pages of docs/benchmarks have from their tables again; nothing is measured.

Use it after a change of `_pages.py` or `_plot.py`. With `--check` nothing is written: the names of
the files that would change are printed, and the exit status is 1 if there are any.
"""

import argparse
import sys
from pathlib import Path

from benchmarks._pages import DOCS, PAGES, complete, write

parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
parser.add_argument("--check", action="store_true", help="only print what would change")
parser.add_argument("directory", nargs="?", type=Path, default=DOCS, help="of the pages")
options = parser.parse_args()

changed = []
for name in PAGES:
    page = (options.directory / f"{name}.md").read_text()
    text, pictures = complete(name, page)
    files = {f"{name}.md": text, **pictures}
    paths = {options.directory / file: content for file, content in files.items()}
    changed += [
        path.name
        for path, content in paths.items()
        if not path.exists() or path.read_text() != content
    ]
    if not options.check:
        write(name, page, options.directory)
print(*changed, sep="\n")
sys.exit(1 if options.check and changed else 0)
