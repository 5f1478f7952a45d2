"""The house keeps its shape: what a reviewer would have to check by hand each time.

CONTRIBUTING.md has the picture; the walls themselves stand in pyproject.toml.
"""

import functools
import graphlib
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

import rpcwheel
from rpcwheel.timer.queue import FORM

ROOT = Path(__file__).parents[2]
PACKAGE = Path(rpcwheel.__file__).parent  # in the tree, or where a wheel was installed
PARTS = [f"rpcwheel.timer.{path.stem}" for path in PACKAGE.glob("timer/*_c.pxd")]
COMPILED = [spec for part in PARTS if (spec := importlib.util.find_spec(part))]
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")

FACE = {"aio", "__version__"}
"""What only the root has: the other face, and what both are."""

INNER = {
    "__main__",
    "backoff",
    "call",
    "cli",
    "durations",
    "instance",
    "methods",
    "observe",
    "policy",
    "probe",
    "testing",
    "workers",
}
"""What the root does not show: programs, and words for those who write a plug-in."""

AIO_ROOMS = {path.parent.name for path in PACKAGE.glob("*/aio.py")}

UNLIKE_TWINS = {"timer"}
"""Rooms whose twins are two things by name: a thread's timer is not a loop's."""

QUEUES = ("_base", "_collector", "_front", "_heap", "_sparse", "_walk", "_wheel", "queue")
TESTED_BY = {  # one behaviour, four structures, two forms: the queues share their tests
    **{f"timer/{part}.py": "timer/test_queues.py" for part in QUEUES},
    "aio.py": "test_house.py",  # names only
    "_grpc/aio_kinds.py": "interceptors/test_aio_contract.py",  # in use, beside a bare channel
    "channel/_members.py": "channel/test_sync_drain.py",
    "channel/_subscriptions.py": "channel/test_sync_state.py",
    "channel/_switch.py": "channel/test_sync_races.py",
    "interceptors/_aio_member.py": "interceptors/test_aio_client.py",
    "interceptors/_aio_tries.py": "interceptors/test_aio_client.py",
    "interceptors/_client_hooks.py": "interceptors/test_client_ends.py",
    "interceptors/queues.py": "interceptors/test_aio.py",
    "kit/members.py": "kit/test_serving.py",
    "registry/_aio_follower.py": "registry/test_aio_named.py",
    "registry/_aio_listed.py": "registry/test_aio_named.py",
    "registry/_follower.py": "registry/test_named.py",
    "registry/_listed.py": "registry/test_named.py",
    "registry/aio.py": "test_house.py",  # names only
    "registry/arguments.py": "registry/test_publisher.py",
    "registry/publishing.py": "registry/test_publisher.py",
    "registry/sync.py": "test_house.py",
    **{
        f"registry/providers/_{engine}_{part}.py": f"registry/providers/test_{engine}.py"
        for engine, parts in (("redis", "hints scripts"), ("zookeeper", "client records session"))
        for part in parts.split()
    },
}
"""Source files whose tests do not stand in `test_<file>.py` of the same room."""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter beside the tests, every warning an error."""
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def sources() -> list[str]:
    """The package's files written by hand, from `rpcwheel/` on."""
    found = [path for path in PACKAGE.rglob("*.py") if not GENERATED.search(path.name)]
    return sorted(path.relative_to(PACKAGE).as_posix() for path in found)


def modules() -> list[str]:
    """Every module that can be imported, generated and compiled ones too."""
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return sorted([*names, *(compiled.name for compiled in COMPILED)])


def rooms() -> list[str]:
    """What stands right under the root and is shown there."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    names = packages | {path.stem for path in PACKAGE.glob("[a-z]*.py")}
    return sorted(name for name in names - INNER - {"aio"} if not name.startswith("_"))


def public(module: str) -> dict[str, object]:
    loaded = importlib.import_module(module)
    return {name: getattr(loaded, name) for name in loaded.__all__}


@functools.cache
def committed() -> list[Path]:
    """What is or will be committed; in a copy without git (the wheel's test), all that is there."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        listing = subprocess.run(git, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in listing.split("\0")]
    else:
        visible = (path for path in ROOT.glob("[!.]*") if path.name not in {"build", "dist"})
        paths = [path for top in visible for path in (top, *top.rglob("*"))]
    return [path for path in paths if path.is_file() and path.suffix not in {".pyc", ".so"}]


# Walls


def test_every_import_goes_down_and_no_wall_is_crossed() -> None:
    run = python("-c", "from importlinter import cli; exit(cli.lint_imports(no_cache=True))")
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_imports_go_in_a_circle() -> None:
    graph = grimp.build_graph("rpcwheel", exclude_type_checking_imports=True, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


ALONE = """
import os, sys, threading
import rpcwheel  # which every import of a module of it begins with
if threading.active_count() > 1:
    print("it starts a thread")
for module in {*sys.argv[1:]} - {*sys.modules}:
    child = os.fork()
    if not child:
        status = 1
        try:
            __import__(module)
            status = threading.active_count() - 1
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        print(module, "does not import alone, or starts a thread")
"""


def test_each_module_imports_alone_in_silence_and_starts_no_thread() -> None:
    run = python("-c", ALONE, *modules())
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


# Names


def test_the_root_shows_what_the_rooms_show_and_nothing_else() -> None:
    of_rooms = {name for room in rooms() for name in public(f"rpcwheel.{room}")}
    assert set(rpcwheel.__all__) == of_rooms | FACE


def test_a_room_that_shares_its_name_with_a_function_is_found_all_the_same() -> None:
    """`rpcwheel.channel(...)` makes a channel, and is what `rpcwheel.channel` was before."""
    code = """if True:
        import rpcwheel.channel.aio as there
        import rpcwheel, rpcwheel.channel.core
        from rpcwheel.channel import ReconnectingChannel
        from rpcwheel.channel.aio import ReconnectingChannel as Other

        assert ReconnectingChannel is rpcwheel.channel.ReconnectingChannel
        assert Other is there.ReconnectingChannel is rpcwheel.channel.aio.ReconnectingChannel
        assert rpcwheel.channel is rpcwheel.registry.channel
        try:
            rpcwheel.channel("")
        except rpcwheel.ConfigurationError:
            pass
    """
    run = python("-c", code)
    assert (run.returncode, run.stderr) == (0, "")


def test_the_faces_of_both_worlds_have_the_same_names() -> None:
    assert set(rpcwheel.aio.__all__) == set(rpcwheel.__all__) - FACE
    assert len(set(rpcwheel.aio.__all__)) == len(rpcwheel.aio.__all__)


def test_a_name_means_in_the_aio_face_what_its_room_says_there() -> None:
    of_twins = {
        name: thing
        for room in AIO_ROOMS - UNLIKE_TWINS
        for name, thing in public(f"rpcwheel.{room}.aio").items()
    }
    assert public("rpcwheel.aio") == {
        name: of_twins.get(name, getattr(rpcwheel, name)) for name in rpcwheel.aio.__all__
    }
    same = [name for name, thing in of_twins.items() if getattr(rpcwheel, name) is thing]
    assert not same, "the sync twin in both faces"


@pytest.mark.parametrize("module", ["rpcwheel", *(f"rpcwheel.{room}" for room in rooms())])
def test_a_name_is_listed_once_and_means_the_same_everywhere(module: str) -> None:
    listed = importlib.import_module(module).__all__
    assert len(set(listed)) == len(listed)
    other = {name for name, thing in public(module).items() if getattr(rpcwheel, name) is not thing}
    assert not other, f"{other} of {module} are something else in the root"


@pytest.mark.parametrize("room", sorted(AIO_ROOMS))
def test_the_twins_of_a_room_have_the_same_names(room: str) -> None:
    same = set(public(f"rpcwheel.{room}.sync")) == set(public(f"rpcwheel.{room}.aio"))
    assert same is (room not in UNLIKE_TWINS)


@pytest.mark.parametrize("room", rooms())
def test_every_public_name_says_what_it_is(room: str) -> None:
    named = public(f"rpcwheel.{room}").items()
    silent = [where for name, thing in named for where in undocumented(name, thing)]
    assert not silent, "no docstring"


def undocumented(name: str, thing: object) -> Iterator[str]:
    """Names of a function, or of a class and its methods and properties, that say nothing."""
    if inspect.isclass(thing):
        automatic = f"{name}("  # what `dataclass` writes where nobody did
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


# Files


@pytest.mark.parametrize("source", [name for name in sources() if "__" not in name])
def test_a_source_file_has_its_test_file(source: str) -> None:
    mirrored = Path(source).with_name("test_" + Path(source).name.lstrip("_"))
    expected = Path("tests", TESTED_BY.get(source, mirrored))
    assert (ROOT / expected).is_file(), f"write {expected}, or name it in TESTED_BY"


def test_no_file_is_too_long_to_be_one_answer() -> None:
    code = [path for path in committed() if path.suffix in {".py", ".pyx", ".pxd"}]
    lengths = {
        path: path.read_text().count("\n") for path in code if not GENERATED.search(path.name)
    }
    assert not {str(path): lines for path, lines in lengths.items() if lines > 400}


def test_no_file_names_a_place_on_one_machine() -> None:
    place = re.compile(rb"(?<![\w.])/(?:work|root|farm|home/\w+|Users/\w+)/")
    assert not [str(path) for path in committed() if place.search(path.read_bytes())]


# The wheel


def test_the_wheel_runs_in_the_form_that_was_asked_for() -> None:
    asked = FORM if os.environ.get("RPCWHEEL_PURE", "0") in {"", "0"} else "pure"
    assert os.environ.get("RPCWHEEL_EXPECT", asked) == asked == FORM


def test_the_wheel_is_compiled_whole_or_not_at_all() -> None:
    assert len(COMPILED) in {0, len(PARTS)}


def test_a_compiled_part_is_made_of_the_source_beside_it() -> None:
    in_the_tree = PACKAGE.parent == ROOT  # installing a wheel makes every file as new
    types = max((path.stat().st_mtime for path in PACKAGE.glob("timer/*.pxd")), default=0.0)
    for compiled in COMPILED if in_the_tree else ():
        source = PACKAGE / "timer" / f"{compiled.name.rpartition('.')[2].removesuffix('_c')}.py"
        changed = max(source.stat().st_mtime, types)
        built = Path(compiled.origin).stat().st_mtime
        assert built >= changed, f"{compiled.name} is stale; `make test` builds it anew"


# README


def test_the_python_of_the_readme_runs() -> None:
    """Each block by itself. What stands right after `<!-- not run: why -->` is only compiled."""
    text = (ROOT / "README.md").read_text()
    block = r"(<!-- not run: [^\n]+ -->\n+)?^```python\n(.*?)^```$"
    for found in re.finditer(block, text, re.MULTILINE | re.DOTALL):
        not_run, code = found.groups()
        where = f"README.md, line {text.count(chr(10), 0, found.start(2)) + 1}"
        compile(code, where, "exec")
        if not not_run:
            run = python("-c", code)
            assert run.returncode == 0, f"{where}\n{run.stderr}"
