"""Lists the versions of the documentation site: `python docs/versions.py SITE [PATH]`.

Each folder of SITE with an `index.html` is a version, named as in `make docs DOCS_VERSION=...`.
Writes `versions.json`, which the version switcher of all of them reads, and `index.html`, which
leads to the newest release, or to `dev` if there is none. PATH is the path of the site on its host,
such as `/rpcwheel/`; by default, the site is the whole host. Needs only the standard library.
"""

import json
import sys
from pathlib import Path

REDIRECT = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={0}/index.html">
<title>rpcwheel</title>
<a href="{0}/index.html">Documentation of rpcwheel {0}</a>
</html>
"""


def order(version: str) -> tuple[bool, list[int], bool]:
    """Return the sort key of a version: candidates, then `dev`, then releases by number."""
    numbers = version.split(".")
    is_release = all(number.isdigit() for number in numbers)
    return is_release, [int(number) for number in numbers] if is_release else [], version == "dev"


def write(site: Path, path: str) -> None:
    """Write both files."""
    names = [page.parent.name for page in site.glob("*/index.html")]
    names.sort(key=order, reverse=True)
    newest = names[0]
    versions = [
        {
            "name": f"{name} (newest)" if order(name)[0] and name == newest else name,
            "version": name,
            "url": f"{path}{name}/",
            "preferred": name == newest,
        }
        for name in names
    ]
    (site / "versions.json").write_text(json.dumps(versions, indent=1) + "\n", "utf-8")
    (site / "index.html").write_text(REDIRECT.format(newest), "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), *sys.argv[2:] or ["/"])
