"""Makes and checks the distributions of the commit that is checked out: `python .ci/dist.py`.

The commands, in this order; without a command, all of them:

* `sdist` writes `dist/rpcwheel-VERSION.tar.gz`.
* `wheel` builds a wheel from this sdist, for this Python and system. On Linux, auditwheel gives it
  the oldest platform tag that it is compatible with.
* `check` examines the metadata and the contents of both.
* `install` installs both in empty environments, the sdist without a C compiler, and tries them.
* `repeat` makes both again, in another directory, and compares the bytes.
* `sbom` installs the wheel with all extras for users, and lists the packages in
  `build/rpcwheel.cdx.json` (CycloneDX).

Changes that are not committed are not included. The programs and the requirements of the build are
those of `.ci/dist.txt`, which must be installed. Bytes are the same for the same commit, Python and
C compiler: each file has the time of the commit (SOURCE_DATE_EPOCH), and no path of the machine is
in it.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DIST: Final = ROOT / "dist"
SMOKE_TEST: Final = ROOT / ".ci" / "smoke.py"

FOR_DEVELOPERS: Final = {"bench", "dev", "docs", "test"}
"""Extras that are not for users."""

RELATIVE_LINK: Final = re.compile(r"""(\]\(|src=")(?!https?:|\#|mailto:)([^)"\s]+)""")
"""A link or picture of README.md: what precedes its target, and the target."""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a program and return its output, which is shown only if the program fails."""
    ran = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "SOURCE_DATE_EPOCH": commit_time(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.exit(f"{ran.stdout}\n{' '.join(map(str, command))}: exit status {ran.returncode}")
    return ran.stdout


def python(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run this Python, with the programs of its environment in PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run(sys.executable, *arguments, cwd=cwd, PATH=path, **environment)


def commit_time() -> str:
    """Return SOURCE_DATE_EPOCH of the environment, or the time of the commit."""
    if "SOURCE_DATE_EPOCH" not in os.environ:
        git = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
        os.environ["SOURCE_DATE_EPOCH"] = subprocess.check_output(git, text=True).strip()
    return os.environ["SOURCE_DATE_EPOCH"]


def single(directory: Path, pattern: str) -> Path:
    """Return the only file with this pattern."""
    files = list(directory.glob(pattern))
    if len(files) != 1:
        sys.exit(f"{directory} has {len(files)} files {pattern}, not 1")
    return files[0]


def own_wheel(directory: Path) -> Path:
    """Return the wheel for this Python and system."""
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename

    wheels = {
        tag: wheel
        for wheel in directory.glob("*.whl")
        for tag in parse_wheel_filename(wheel.name)[3]
    }
    for tag in sys_tags():
        if tag in wheels:
            return wheels[tag]
    sys.exit(f"{directory} has no wheel for this Python and system")


# The sdist


def with_absolute_links(text: str, version: str) -> str:
    """Return README.md with links that also work outside of the repository.

    They lead to the tag of the version, or to `main` for a version without a tag.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    repository = project["urls"]["Repository"]
    ref = "main" if "dev" in version else f"v{version}"

    def absolute(link: re.Match[str]) -> str:
        before, target = link.groups()
        kind = "raw" if target.endswith((".svg", ".png")) else "blob"
        return f"{before}{repository}/{kind}/{ref}/{target}"

    return RELATIVE_LINK.sub(absolute, text)


def write_sdist(built: Path, target: Path) -> None:
    """Copy an sdist: with the time of the commit, without owners, with absolute links."""
    version = built.name.removeprefix("rpcwheel-").removesuffix(".tar.gz")
    seconds = int(commit_time())
    copied = BytesIO()
    with tarfile.open(built) as old, tarfile.open(fileobj=copied, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime = seconds
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            content = old.extractfile(member)
            data = b"" if content is None else content.read()
            if member.name.endswith(("/PKG-INFO", f"rpcwheel-{version}/README.md")):
                data = with_absolute_links(data.decode(), version).encode()
                member.size = len(data)
            new.addfile(member, BytesIO(data))
    target.write_bytes(gzip.compress(copied.getvalue(), mtime=seconds))


def sdist(dist: Path = DIST) -> None:
    """Make the sdist from a clone, which has the committed files only."""
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    if changes := run("git", "status", "--porcelain"):
        print(f"not included, because it is not committed:\n{changes}", end="")
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place) / "clone"
        run("git", "clone", "--quiet", ROOT, clone)
        run("git", "checkout", "--quiet", "--detach", cwd=clone)  # an sdist has the branch in it
        python("-m", "build", "--no-isolation", "--sdist", "--outdir", place, clone)
        built = single(Path(place), "*.tar.gz")
        write_sdist(built, dist / built.name)


# The wheel


def wheel(dist: Path = DIST) -> None:
    """Build a wheel from the sdist."""
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(single(dist, "*.tar.gz")) as archive:
            archive.extractall(place, filter="data")
        source, out = single(Path(place), "rpcwheel-*"), Path(place) / "out"
        python("-m", "build", "--no-isolation", "--wheel", "--outdir", out, source)
        built = single(out, "*.whl")
        if sys.platform == "linux":
            python("-m", "auditwheel", "repair", "--wheel-dir", dist, built)
        else:
            shutil.copy(built, dist)


# Checks


def check(dist: Path = DIST) -> None:
    """Examine metadata and contents."""
    files = sorted(dist.iterdir())
    print(python("-m", "twine", "check", "--strict", *files), end="")
    print(python("-m", "check_wheel_contents", own_wheel(dist)), end="")


def install(dist: Path = DIST) -> None:
    """Install the wheel, and the sdist without a C compiler, in empty environments; try both."""
    no_compiler = {"CC": "/bin/false", "CXX": "/bin/false"}
    for file, form in ((own_wheel(dist), "native"), (single(dist, "*.tar.gz"), "pure")):
        with tempfile.TemporaryDirectory() as place:
            venv.create(place, with_pip=True)
            here, new = Path(place), Path(place) / "bin" / "python"
            dependencies = ("grpcio", "pydantic", "tenacity", "hyperframe", "rich", "typer")
            run(new, "-m", "pip", "install", "--quiet", *dependencies, cwd=here)
            began = time.monotonic()
            run(new, "-m", "pip", "install", "--quiet", f"{file}[cli]", cwd=here, **no_compiler)
            seconds = time.monotonic() - began
            print(f"{file.name}: installed in {seconds:.1f} s, without its dependencies")
            print(run(new, "-I", SMOKE_TEST, form, cwd=here), end="")


def repeat(dist: Path = DIST) -> None:
    """Make both again and compare the bytes."""
    with tempfile.TemporaryDirectory() as place:
        again = Path(place)
        sdist(again / "dist")
        wheel(again / "dist")
        for file in sorted(dist.iterdir()):
            if (again / "dist" / file.name).read_bytes() != file.read_bytes():
                sys.exit(f"{file.name} has other bytes when it is made again")
            print(f"{file.name}: the same bytes when it is made again")


def sbom(dist: Path = DIST) -> None:
    """List the packages of an installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [name for name in project["optional-dependencies"] if name not in FOR_DEVELOPERS]
    output = ROOT / "build" / "rpcwheel.cdx.json"
    output.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=True)
        new = Path(place) / "bin" / "python"
        run(new, "-m", "pip", "install", "--quiet", f"{own_wheel(dist)}[{','.join(extras)}]")
        run(new, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")
        options = ("--pyproject", "pyproject.toml", "--mc-type", "library", "--output-reproducible")
        python("-m", "cyclonedx_py", "environment", *options, "--output-file", output, new)
    listed = json.loads(output.read_text("utf-8"))
    listed["metadata"]["component"]["version"] = own_wheel(dist).name.split("-")[1]
    output.write_text(json.dumps(listed, indent=2) + "\n", "utf-8")
    print(f"{output.relative_to(ROOT)}: the packages of rpcwheel[{','.join(extras)}]")


COMMANDS: Final[dict[str, Callable[[], None]]] = {
    command.__name__: command for command in (sdist, wheel, check, install, repeat, sbom)
}

if __name__ == "__main__":
    for name in sys.argv[1:] or COMMANDS:
        COMMANDS[name]()
