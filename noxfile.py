"""Runs the checks with every installed Python.

`nox` runs all sessions; `nox -s lint`, `nox -s "tests-3.13(native)"` or `nox -s wheel` runs one.
"""

import os
import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
HERE = Path(__file__).parent


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff, import-linter, and towncrier on the fragments of the changelog."""
    session.install("--editable", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", "--no-logo")
    session.run("towncrier", "build", "--draft", "--version", "next")


@nox.session
def types(session: nox.Session) -> None:
    """Run mypy --strict on the package, the examples and the tests of the public API."""
    session.install("--editable", ".[dev]")
    session.run("mypy")


@nox.session(python=PYTHONS)
@nox.parametrize("form", [nox.param(form, id=form) for form in ("native", "pure")])
def tests(session: nox.Session, form: str) -> None:
    """Run all tests in the source tree, with the compiled and the pure form of the timer."""
    session.install("--editable", ".[test]")
    forced = {"RPCWHEEL_PURE": "1"} if form == "pure" else {}
    session.run("pytest", "-n", "2", *session.posargs, env={"TEST_EXPECT": form, **forced})


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """Run all tests with the oldest dependencies that `pyproject.toml` allows.

    Except protobuf, rich and opentelemetry-api: grpcio-health-checking, import-linter and
    opentelemetry-instrumentation-grpc need newer versions. And except typer, which emits a
    DeprecationWarning before 0.26 with the newest click.
    """
    project = nox.project.load_toml("pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    used = ("config", "dns", "postgresql", "prometheus", "redis", "zookeeper")
    users = (project["dependencies"], *(extras[name] for name in used))
    oldest = [each.replace(">=", "==") for several in users for each in several]
    session.install("--editable", ".[test]", *oldest)
    session.run("pytest", "-n", "2", *session.posargs)


@nox.session(python=PYTHONS[-1])
def uvloop(session: nox.Session) -> None:
    """Run the unit and contract tests with the event loop of uvloop in place of asyncio's."""
    session.install("--editable", ".[test]")
    arguments = session.posargs or ["tests/unit", "tests/contract"]
    session.run("pytest", "-n", "4", *arguments, env={"TEST_LOOP": "uvloop"})


@nox.session(python=PYTHONS)
def extras(session: nox.Session) -> None:
    """Install the wheel in `dist/` with each extra alone, and with all of them; try it."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    names = [*project["optional-dependencies"]]
    tag = f"cp{str(session.python).replace('.', '')}"
    (built,) = HERE.glob(f"dist/*-{tag}-{tag}-*")
    for chosen in ["", *names, ",".join(names)]:
        place = Path(session.create_tmp()) / "environment"
        session.run("python", "-m", "venv", "--clear", str(place))
        python = str(place / "bin" / "python")
        session.run(python, "-m", "pip", "install", "-q", f"{built}[{chosen}]", external=True)
        session.run(python, "-m", "pip", "check", external=True)
        session.run(python, ".ci/smoke.py", "native", external=True)


@nox.session(python=PYTHONS)
def wheel(session: nox.Session) -> None:
    """Build a wheel from the sdist, install it, and test it outside the source tree.

    If the variable TEST_WHEELS names a directory, test the wheel in it.
    """
    place = Path(session.create_tmp())
    shutil.rmtree(place)
    place.mkdir()
    wheels = Path(os.environ.get("TEST_WHEELS", place / "dist"))
    if "TEST_WHEELS" not in os.environ:
        session.install("build")
        session.run("python", "-m", "build", "--outdir", str(wheels))
    tag = f"cp{str(session.python).replace('.', '')}"
    (built,) = (wheel for wheel in wheels.glob(f"*-{tag}-{tag}-*") if "musllinux" not in wheel.name)
    session.install(f"{built}[test]")
    for name in ("benchmarks", "docs", "examples", "tests"):
        shutil.copytree(HERE / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(HERE / name, place)
    session.chdir(place)
    session.run("pytest", "-n", "2", *session.posargs, env={"TEST_EXPECT": "native"})
