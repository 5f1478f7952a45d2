"""Every check over every Python that is here.

`nox` runs all; `nox -s lint`, `nox -s "tests-3.13(native)"` or `nox -s wheel` one of them.
"""

import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
HERE = Path(__file__).parent


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and layout, and the walls."""
    session.install("--editable", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", "--no-logo")


@nox.session
def types(session: nox.Session) -> None:
    """Run mypy --strict over the package, the examples and the public API."""
    session.install("--editable", ".[dev]")
    session.run("mypy")


@nox.session(python=PYTHONS)
@nox.parametrize("form", [nox.param(form, id=form) for form in ("native", "pure")])
def tests(session: nox.Session, form: str) -> None:
    """Run the suite in the tree, over the compiled wheel and over the pure one."""
    session.install("--editable", ".[test]")
    forced = {"RPCWHEEL_PURE": "1"} if form == "pure" else {}
    session.run("pytest", "-n", "2", *session.posargs, env={"RPCWHEEL_EXPECT": form, **forced})


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """Run the suite with the oldest packages that users may have, as `pyproject.toml` says.

    Not the oldest protobuf and rich: grpcio-health-checking and import-linter need newer ones.
    """
    project = nox.project.load_toml("pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    users = (project["dependencies"], extras["config"], extras["redis"], extras["zookeeper"])
    oldest = [each.replace(">=", "==") for several in users for each in several]
    session.install("--editable", ".[test]", *oldest)
    session.run("pytest", "-n", "2", *session.posargs)


@nox.session(python=PYTHONS)
def wheel(session: nox.Session) -> None:
    """Test what users get: the wheel out of the sdist, installed, in a place without the tree."""
    place = Path(session.create_tmp())
    shutil.rmtree(place)
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(place / "dist"))
    (built,) = (place / "dist").glob("*.whl")
    session.install(f"{built}[test]")
    for name in ("benchmarks", "docs", "examples", "tests"):
        shutil.copytree(HERE / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(HERE / name, place)
    session.chdir(place)
    session.run("pytest", "-n", "2", *session.posargs, env={"RPCWHEEL_EXPECT": "native"})
