"""Writes the generated pages of the reference, into docs/reference. docs/conf.py runs it.

* `api/`: a page for each public module, from its docstrings.
* `command-line.md`: all commands with their options, from the texts of `rpcwheel --help`.
"""

from importlib import import_module
from pathlib import Path
from typing import Annotated, get_origin

import typer
from typer.cli import get_docs_for_click

import rpcwheel
from rpcwheel.cli.app import app

PAGES = Path(__file__).with_name("reference")
PACKAGE = Path(rpcwheel.__file__).parent

NOT_LISTED = {"rpcwheel", "rpcwheel.aio", "rpcwheel.cli"}
"""Modules without a page: those that only re-export names, and the command line."""

INDEX = """\
# Python API

## Names of `rpcwheel`

The names that most programs need. `rpcwheel.aio` has the same names for `grpc.aio`.

"""

MODULE = """\
# {module}

```{{eval-rst}}
.. automodule:: {module}
   :members: {names}
```
"""


def public_modules() -> dict[str, list[str]]:
    """Return each public module with its public names that no other module above it has.

    A module is public if it has `__all__` and no part of its name begins with an underscore.
    """
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
    modules = {".".join(path.parts).removesuffix(".__init__") for path in paths} - NOT_LISTED
    listed: set[int] = set()
    pages = {}
    for name in sorted(modules, key=lambda name: (name.count("."), name)):
        if "._" in name or name.endswith("__main__"):
            continue
        module = import_module(name)
        names = [
            own for own in getattr(module, "__all__", ()) if is_new(getattr(module, own), listed)
        ]
        listed.update(id(getattr(module, own)) for own in names)
        if names:
            pages[name] = names
    return dict(sorted(pages.items()))


def is_new(value: object, listed: set[int]) -> bool:
    """Tell whether a value is to be described; types that pydantic alone needs are not."""
    return id(value) not in listed and get_origin(value) is not Annotated


def index(pages: dict[str, list[str]]) -> str:
    """Return the page of the API: the names of `rpcwheel`, and all modules."""
    places = {
        id(getattr(import_module(module), name)): module
        for module, names in pages.items()
        for name in names
    }
    text = INDEX
    for name in sorted(rpcwheel.__all__, key=str.lower):
        if module := places.get(id(getattr(rpcwheel, name))):
            text += f"* {{py:obj}}`{name} <{module}.{name}>` of `{module}`\n"
    text += "\n## Modules\n\n"
    for module in pages:
        summary = (import_module(module).__doc__ or "").partition("\n")[0]
        text += f"* [{module}]({module}.md): {summary}\n"
    return text + "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def commands() -> str:
    """Return the page of the command line."""
    command = typer.main.get_command(app)
    context = typer.Context(command)
    return get_docs_for_click(obj=command, ctx=context, name="rpcwheel", title="Command line")


def write() -> None:
    """Write the pages that have changed, so that Sphinx reads only these again."""
    pages = public_modules()
    texts = {"command-line.md": commands(), "api/index.md": index(pages)}
    for module, names in pages.items():
        texts[f"api/{module}.md"] = MODULE.format(module=module, names=", ".join(names))
    for path in PAGES.rglob("*.md"):
        if str(path.relative_to(PAGES)) not in texts:
            path.unlink()
    for name, text in texts.items():
        path = PAGES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


if __name__ == "__main__":
    write()
