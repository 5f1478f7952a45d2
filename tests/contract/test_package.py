"""Rules for the package as a whole: imports, public names, docstrings, the compiled timer, README.

The layers are in pyproject.toml; `make layers` checks them.
"""

import ast
import functools
import graphlib
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import grimp
import pytest

import rpcwheel
from fixtures.programs import ROOT, python
from rpcwheel.timer.queue import FORM

PACKAGE = Path(rpcwheel.__file__).parent  # in the tree, or where a wheel was installed
PARTS = [f"rpcwheel.timer.{path.stem}" for path in PACKAGE.glob("timer/*_c.pxd")]
COMPILED = [spec for part in PARTS if (spec := importlib.util.find_spec(part))]
FREE_THREADED = shutil.which("python3.14t") or shutil.which("python3.13t") or ""

TOP_ONLY = {"aio", "__version__"}
"""Public names of `rpcwheel` that no subpackage has."""

NOT_EXPORTED = {
    "__main__", "backoff", "call_counts", "rpc", "cli", "durations", "exiting", "instance",
    "methods", "metrics", "events", "policy", "probe", "status", "telemetry", "testing", "workers",
}  # fmt: skip
"""Modules whose names `rpcwheel` does not re-export: programs, and types for plug-ins."""

USES_SHARED_RANDOM = {
    "balancer/pickers.py", "balancer/ring_hash.py", "limit/server.py", "timer/periodic.py",
}  # fmt: skip
"""Modules that draw from the program's generator: for each call, where `backoff.RANDOM` costs too
much, and in the timer, which loads no dependency."""

HAS_RANDOM = {
    "backoff.py", "testing/conformance/journal_model.py", "testing/conformance/registry_model.py",
}  # fmt: skip
"""Modules with generators of their own."""

AIO_PACKAGES = {path.parent.name for path in PACKAGE.glob("*/aio.py")}

DIFFERENT_NAMES = {"timer"}
"""Packages whose sync and aio modules have different names: `WheelTimer`, `AsyncWheelTimer`."""


def modules() -> list[str]:
    """Every module that can be imported, generated and compiled ones too."""
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return sorted([*names, *(compiled.name for compiled in COMPILED)])


def packages() -> list[str]:
    """The modules and packages whose public names `rpcwheel` re-exports."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    names = packages | {path.stem for path in PACKAGE.glob("[a-z]*.py")}
    return sorted(name for name in names - NOT_EXPORTED - {"aio"} if not name.startswith("_"))


def public(module: str) -> dict[str, object]:
    loaded = importlib.import_module(module)
    return {name: getattr(loaded, name) for name in loaded.__all__}


@functools.cache
def committed() -> list[Path]:
    """Files that are or will be committed; without git (the test of a wheel), all files."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        listing = subprocess.run(git, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in listing.split("\0")]
    else:
        visible = (path for path in ROOT.glob("[!.]*") if path.name not in {"build", "dist"})
        paths = [path for top in visible for path in (top, *top.rglob("*"))]
    return [path for path in paths if path.is_file() and path.suffix not in {".pyc", ".so"}]


# Imports


def test_there_is_no_import_cycle_also_under_type_checking() -> None:
    graph = grimp.build_graph("rpcwheel", exclude_type_checking_imports=False, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the cycle


COMPUTED_IMPORTS = {
    "_lazy.py": "public names of all packages, on first use",
    "kit/base.py": "the package of a feature, in the world of the kit",
    "journal/opening.py": "engines of its own package",
    "registry/backends/__init__.py": "engines of its own package",
    "timer/queue.py": "the two forms of its own package",
    "cli/journal_work.py": "modules of the user",
}
"""Where a module is imported by a string, and what; import-linter sees none of these imports."""


def test_modules_are_imported_by_a_string_only_where_that_makes_no_circle() -> None:
    calls = re.compile(r"\b(?:import_module|__import__)\(")
    paths = [path for path in PACKAGE.rglob("*.py") if calls.search(path.read_text("utf-8"))]
    assert {str(path.relative_to(PACKAGE)) for path in paths} == set(COMPUTED_IMPORTS)


DEPENDENCIES = {"asyncio", "grpc", "pydantic", "tenacity"}


def loaded_by(code: str) -> set[str]:
    """The modules that a program has loaded at its end."""
    run = python("-c", f"import sys\n{code}\nprint(*sys.modules)")
    assert (run.returncode, run.stderr) == (0, "")
    return set(run.stdout.split())


def test_no_other_module_draws_from_the_generator_of_the_program() -> None:
    uses = re.compile("^ *(import random$|from random import)", re.MULTILINE)
    paths = [path for path in PACKAGE.rglob("*.py") if uses.search(path.read_text())]
    modules = {path.relative_to(PACKAGE).as_posix() for path in paths}
    assert modules == USES_SHARED_RANDOM | HAS_RANDOM


def test_import_rpcwheel_loads_no_dependency_and_no_submodule() -> None:
    loaded = loaded_by("import rpcwheel")
    assert loaded & DEPENDENCIES == set()
    own = {"rpcwheel._lazy", "rpcwheel.telemetry", "rpcwheel.telemetry.components"}
    assert {name for name in loaded if name.startswith("rpcwheel.")} == own


def test_a_kit_of_calls_loads_no_aio_module_and_no_unused_package() -> None:
    loaded = loaded_by("import rpcwheel; rpcwheel.Kit(timeout=2.0).client_interceptors()")
    unused = re.compile(
        r"rpcwheel\.(.*\baio\b.*|balancer\..*|heartbeat\.(monitor|sync)|idle\.(detector|sync)|"
        r"(publisher|resolver)\..*|registry\.(session|sync|backends\..*))|tomllib|sqlite3"
    )
    assert sorted(filter(unused.fullmatch, loaded)) == []


def test_the_timer_loads_neither_grpc_nor_pydantic() -> None:
    loaded = loaded_by("import rpcwheel\nrpcwheel.timer.ManualTimer, rpcwheel.shared_timer()")
    assert loaded & {"asyncio", "grpc", "pydantic"} == set()


IMPORTS = """
import os, sys, threading
import asyncio, grpc, grpc.aio, pydantic, tenacity
import rpcwheel  # which every import of a module of it begins with

names = sys.stdin.read().split()
for module in names:
    if module.count(".") == 1 or module.endswith(".aio"):
        child = os.fork()
        if not child:
            status = 1
            try:
                __import__(module)
                status = 0
            finally:
                if status:
                    sys.excepthook(*sys.exc_info())
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            print(module, "does not import first")
for module in names:
    __import__(module)
    if threading.active_count() > 1:
        sys.exit(f"{module} starts a thread")
"""
"""Modules inside the packages have no cycle, so that their order does not matter."""


def test_each_package_can_be_imported_first_and_no_module_starts_a_thread() -> None:
    run = python("-c", IMPORTS, stdin="\n".join(modules()))
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


# Names


def test_the_package_exports_at_most_40_names_of_its_subpackages() -> None:
    exported = {name for package in packages() for name in public(f"rpcwheel.{package}")}
    assert set(rpcwheel.__all__) - TOP_ONLY <= exported
    assert len(rpcwheel.__all__) <= 40


ON_FIRST_USE = {
    "subpackages are attributes": """
import rpcwheel

rpcwheel.events.add_sink, rpcwheel.failback.aio.FailbackInvoker, rpcwheel.timer.queue.FORM
for name in {names}:
    getattr(rpcwheel, name)
""",
    "a name that does not exist imports nothing": """
import sys, rpcwheel, rpcwheel.failback

class Import:  # also not modules that need an extra: `hasattr` would raise what they raise
    def find_spec(self, name, path=None, target=None):
        raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Import())
for module, name in ((rpcwheel, "cli"), (rpcwheel, "x"), (rpcwheel.failback, "x")):
    assert not hasattr(module, name), name
""",
    "dir has all public names": """
import rpcwheel, rpcwheel.aio, rpcwheel.registry

for module in (rpcwheel, rpcwheel.aio, rpcwheel.registry):
    assert set(module.__all__) <= set(dir(module))
""",
    "a star import has all public names": """
from rpcwheel import *
import rpcwheel

assert {{*rpcwheel.__all__}} <= {{*globals()}}
""",
}


@pytest.mark.parametrize("code", ON_FIRST_USE.values(), ids=ON_FIRST_USE)
def test_on_first_use(code: str) -> None:
    run = python("-c", code.format(names=[*packages(), "aio", "events"]))
    assert (run.returncode, run.stderr) == (0, "")


def test_type_checkers_see_the_modules_that_are_loaded_on_first_use() -> None:
    """`import rpcwheel` is enough for `rpcwheel.registry.aio`; Pyright believes only imports."""
    for path in Path(rpcwheel.__file__).parent.glob("**/__init__.py"):
        tree = ast.parse(path.read_text())
        listed = {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.keyword) and node.arg == "submodules"
            for name in ast.literal_eval(node.value).split()
        }
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.level, node.module) == (1, None)
            for alias in node.names
        }
        assert listed <= imported, path


def test_a_name_that_does_not_exist_raises_attribute_error_with_its_place() -> None:
    for module in (rpcwheel, rpcwheel.aio, rpcwheel.registry):
        with pytest.raises(
            AttributeError, match=f"module '{module.__name__}' has no attribute 'RetryPolcy'$"
        ):
            module.RetryPolcy  # noqa: B018
    for module, place in [
        (rpcwheel, "rpcwheel.transport.ReconnectingChannel"),
        (rpcwheel.aio, "rpcwheel.transport.aio.ReconnectingChannel"),
    ]:
        with pytest.raises(AttributeError, match=rf"'ReconnectingChannel'; it is {place}$"):
            module.ReconnectingChannel  # noqa: B018 - an attribute that it does not have
    with pytest.raises(ImportError, match="cannot import name 'Kitt' from 'rpcwheel'"):
        from rpcwheel import Kitt  # noqa: F401


def test_rpcwheel_and_rpcwheel_aio_have_the_same_names() -> None:
    assert set(rpcwheel.aio.__all__) == set(rpcwheel.__all__) - TOP_ONLY
    assert len(set(rpcwheel.aio.__all__)) == len(rpcwheel.aio.__all__)


def test_rpcwheel_aio_exports_the_aio_variants() -> None:
    aio_names = {
        name: thing
        for package in AIO_PACKAGES - DIFFERENT_NAMES
        for name, thing in public(f"rpcwheel.{package}.aio").items()
    }
    assert public("rpcwheel.aio") == {
        name: aio_names.get(name, getattr(rpcwheel, name)) for name in rpcwheel.aio.__all__
    }


def test_the_aio_variant_of_a_name_is_another_object() -> None:
    for package in AIO_PACKAGES - DIFFERENT_NAMES:
        blocking, aio = public(f"rpcwheel.{package}"), public(f"rpcwheel.{package}.aio")
        assert not [name for name, thing in aio.items() if blocking[name] is thing], package


def test_a_public_name_is_listed_once_and_is_the_same_object_everywhere() -> None:
    exported = public("rpcwheel")
    for package in packages():
        listed = importlib.import_module(f"rpcwheel.{package}").__all__
        assert len(set(listed)) == len(listed), package
        named = public(f"rpcwheel.{package}").items()
        other = [name for name, thing in named if exported.get(name, thing) is not thing]
        assert not other, f"they are something else in the root than in {package}"


def test_the_sync_and_aio_modules_of_a_package_have_the_same_names() -> None:
    for package in AIO_PACKAGES:
        same = set(public(f"rpcwheel.{package}.sync")) == set(public(f"rpcwheel.{package}.aio"))
        assert same is (package not in DIFFERENT_NAMES), package


def test_every_public_name_has_a_docstring() -> None:
    for package in packages():
        named = public(f"rpcwheel.{package}").items()
        assert not [where for name, thing in named for where in undocumented(name, thing)]


def undocumented(name: str, thing: object) -> Iterator[str]:
    """Names without a docstring: a function, or a class with its methods and properties."""
    if inspect.isclass(thing):
        automatic = f"{name}("  # the docstring that `dataclass` generates
        if not thing.__doc__ or thing.__doc__.startswith(automatic):
            yield name
        for part, value in vars(thing).items():
            if not part.startswith("_") and isinstance(
                value, (property, functools.cached_property)
            ):
                yield from [] if value.__doc__ else [f"{name}.{part}"]
            elif not part.startswith("_") and inspect.isroutine(value):
                yield from undocumented(f"{name}.{part}", getattr(thing, part))
    elif inspect.isroutine(thing) and not inspect.getdoc(thing):
        yield name


def test_public_functions_have_no_private_parameters() -> None:
    for module in packages() + [f"{name}.aio" for name in AIO_PACKAGES]:
        for function in filter(inspect.isfunction, public(f"rpcwheel.{module}").values()):
            parameters = inspect.signature(function).parameters
            assert not [name for name in parameters if name[0] == "_"], function


# Files


def test_no_file_contains_a_path_of_one_machine() -> None:
    place = re.compile(rb"(?<![\w.])/(?:work|root|farm|home/\w+|Users/\w+)/")
    assert not [str(path) for path in committed() if place.search(path.read_bytes())]


# The compiled timer


def test_the_timer_runs_in_the_requested_form() -> None:
    asked = FORM if os.environ.get("RPCWHEEL_PURE", "0") in {"", "0"} else "pure"
    assert os.environ.get("TEST_EXPECT", asked) == asked == FORM


def test_the_first_use_of_the_timer_without_the_gil_raises_import_error() -> None:
    gil_off = "import sys; sys._is_gil_enabled = lambda: False; "
    ran = python("-c", gil_off + "import rpcwheel.timer; rpcwheel.timer.WheelTimer")
    assert "ImportError: rpcwheel's timer relies on the GIL" in ran.stderr


@pytest.mark.skipif(not FREE_THREADED, reason="neither python3.14t nor python3.13t in PATH")
def test_free_threaded_python_runs_the_timer_only_with_the_gil() -> None:
    code = "from rpcwheel.timer import WheelTimer; WheelTimer().stop(); print('ran')"
    ran = python("-X", "gil=1", "-c", code, executable=FREE_THREADED)
    assert ran.stdout == "ran\n", ran.stderr
    ran = python("-X", "gil=0", "-c", code, executable=FREE_THREADED)
    assert "ImportError: rpcwheel's timer relies on the GIL" in ran.stderr


def test_the_timer_is_compiled_completely_or_not_at_all() -> None:
    assert len(COMPILED) in {0, len(PARTS)}


def test_the_compiled_timer_is_newer_than_its_source() -> None:
    in_the_tree = PACKAGE.parent == ROOT  # installing a wheel makes every file as new
    types = max((path.stat().st_mtime for path in PACKAGE.glob("timer/*.pxd")), default=0.0)
    for compiled in COMPILED if in_the_tree else ():
        source = PACKAGE / "timer" / f"{compiled.name.rpartition('.')[2].removesuffix('_c')}.py"
        changed = max(source.stat().st_mtime, types)
        built = Path(compiled.origin).stat().st_mtime
        assert built >= changed, f"{compiled.name} is stale; `make test` builds it anew"


# Objects


def test_an_object_whose_constructor_has_raised_has_a_repr() -> None:
    for package, world in itertools.product(AIO_PACKAGES, ("sync", "aio")):
        module = importlib.import_module(f"rpcwheel.{package}.{world}")
        for name in module.__all__:
            kind = getattr(module, name)
            if not inspect.isclass(kind) or is_dataclass(kind):
                continue
            module_of_repr = getattr(kind.__repr__, "__module__", "")
            if module_of_repr.startswith("rpcwheel"):
                assert name in repr(kind.__new__(kind))


def test_an_error_of_a_shared_method_names_the_public_class() -> None:
    for kit in (rpcwheel.Kit(), rpcwheel.aio.Kit()):
        with pytest.raises(TypeError, match=r"^Kit\.serve\(\) missing 1 required"):
            kit.serve(None, publish="memory://a")
