"""Prints a version's part of the changelog: `python .ci/release_notes.py v1.2.3`.

Its links are absolute, so that a release of GitHub can show it.

Exits with an error if the tag is not ready to be released: the version of the checked-out commit
differs, fragments of the changelog are left, or CHANGELOG.md has no part for the version.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from dist import with_absolute_links

ROOT: Final = Path(__file__).parents[1]


def problems(version: str, built: str, fragments: list[str], notes: str) -> list[str]:
    """Return what must be corrected before the version can be released."""
    mistakes = []
    if built != version:
        mistakes.append(f"the commit has the version {built}, not {version}")
    if fragments:
        mistakes.append(f"run `make changelog VERSION={version}`: {', '.join(fragments)}")
    if not notes:
        mistakes.append(f"CHANGELOG.md has no part `## {version}`")
    return mistakes


def part(changelog: str, version: str) -> str:
    """Return the part of a version without its heading, or an empty string."""
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        if heading.split()[:1] == [version]:
            return text.strip() + "\n"
    return ""


def main(tag: str) -> None:
    """Print the part, or exit with all problems."""
    version = tag.removeprefix("v")
    command = [sys.executable, "-m", "setuptools_scm"]
    built = subprocess.check_output(command, cwd=ROOT, text=True).strip()
    fragments = sorted(path.name for path in (ROOT / "changes").iterdir())
    fragments.remove("README.md")
    notes = part((ROOT / "CHANGELOG.md").read_text("utf-8"), version)
    if mistakes := problems(version, built, fragments, notes):
        sys.exit("\n".join([f"{tag} cannot be released:", *mistakes]))
    print(with_absolute_links(notes, version), end="")


if __name__ == "__main__":
    main(sys.argv[1])
