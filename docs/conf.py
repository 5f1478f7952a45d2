"""Settings of the documentation site: `make docs` builds it with Sphinx.

The pages are Markdown that also reads well in the repository. Their relative links lead to pages
of the site, and links to other files of the repository to its URL (`resolve_links`).
"""

import os
import re
import runpy
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

from rpcwheel.policy import Policy

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

VERSION = os.environ.get("DOCS_VERSION", "dev")
"""The name of this version in the version switcher, and of its folder on the site."""

REPOSITORY = PROJECT["urls"]["Repository"]
GIT_REF = "main" if VERSION == "dev" else f"v{VERSION}"
"""Links to files outside of docs/ lead to this branch or tag of the repository."""

INCLUDED = {
    "index": "README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
    "operations/deployment": "deploy/README.md",
}
"""Pages that include a file from outside of docs/, whose links are relative to that file."""

DOWNLOAD = addnodes.download_reference

# Sphinx

project = "rpcwheel"
author = "the authors of rpcwheel"
project_copyright = author
version = release = VERSION
language = "en"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
]
nitpicky = True
copybutton_exclude = ".linenos, .gp, .go"  # of a session, only its commands are copied

# Reference

runpy.run_path(str(DOCS / "reference.py"), run_name="__main__")
default_role = "py:obj"  # `Name` in a docstring is a link, if it is in the reference
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"exclude-members": "model_config, short"}
# Names in docstrings may be parameters, and the reference has no pages of other packages.
nitpick_ignore_regex = [("py:.*", ".*")]
suppress_warnings = ["ref.python"]  # a type of both APIs, such as Registry: the first one is linked
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# Markdown

myst_heading_anchors = 4  # with the slugs of GitHub
myst_links_external_new_tab = False

# Theme. All of its files are on the site: fonts, styles and scripts too.

html_theme = "pydata_sphinx_theme"
html_title = "rpcwheel"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["styles"]
html_css_files = ["site.css"]
html_theme_options = {
    "logo": {"text": "rpcwheel"},
    "icon_links": [{"name": "Repository", "url": REPOSITORY, "icon": "fa-brands fa-github"}],
    "navbar_start": ["navbar-logo", "version-switcher"],
    "header_links_before_dropdown": 7,
    "navigation_depth": 2,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    # Relative to the root of this version; docs/versions.py writes the file.
    "switcher": {"json_url": "../versions.json", "version_match": VERSION},
    "check_switcher": False,
}


# The check of external links, `make docs-links`

linkcheck_ignore = [REPOSITORY, r"https?://(127\.0\.0\.1|localhost)\b"]
linkcheck_anchors = False


def resolve_links(app: Sphinx, document: nodes.document) -> None:
    """Let relative links lead to pages of this site, or to files of the repository."""
    page = app.env.current_document.docname
    here = ROOT / INCLUDED[page] if page in INCLUDED else DOCS / page
    pages = {ROOT / path: name for name, path in INCLUDED.items()}
    for node in [*document.findall(addnodes.pending_xref), *document.findall(DOWNLOAD)]:
        if node["reftype"] != "myst":
            continue
        target, _, anchor = node["reftarget"].partition("#")
        if node["refdomain"] == "doc":  # a Markdown file, with its suffix removed
            path = DOCS / f"{target}.md"
        else:
            path = Path(os.path.normpath(here.parent / target))
        name = pages.get(path) or app.env.path2doc(path)
        if not target or not path.exists():
            continue  # an anchor of this page, or a page; Sphinx warns of what does not exist
        if name in app.env.found_docs:
            link = addnodes.pending_xref(
                **node.attributes | {"refdomain": "doc", "reftarget": name}
            )
            link["reftargetid"] = node.get("reftargetid") or anchor or None
        else:
            kind = "tree" if path.is_dir() else "blob"
            file = path.relative_to(ROOT).as_posix()
            link = nodes.reference(refuri=f"{REPOSITORY}/{kind}/{GIT_REF}/{file}")
        link.extend(node.children)
        node.replace_self(link)


GOOGLE_FORM = Config(napoleon_use_rtype=False, napoleon_use_ivar=True)


def read_docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Make reStructuredText of a docstring in the Google form.

    An indented block after a blank line is code. Docstrings of attributes are left as they are,
    because `napoleon` takes their text before the first colon for a type.
    """
    for number in range(len(lines) - 1, 1, -1):
        before = next((line for line in reversed(lines[:number]) if line), "")
        starts = lines[number].startswith("    ") and not lines[number - 1]
        if starts and not before.startswith((" ", "* ")) and not before.endswith("::"):
            lines[number:number] = ["::", ""]
    if what not in {"attribute", "data", "property"}:
        lines[:] = GoogleDocstring(lines, GOOGLE_FORM, app, what, name, obj, options).lines()


def shorten_signature(
    _app: Sphinx, _what: str, _name: str, obj: object, _options: object, _text: str, returns: str
) -> tuple[str, str] | None:
    """Leave the settings of a policy to its attributes."""
    is_policy = isinstance(obj, type) and issubclass(obj, Policy)
    return ("(**settings)", returns) if is_policy else None


def show_defaults(_app: Sphinx, document: nodes.document) -> None:
    """Show the default of each setting in place of its annotation, which is for pydantic."""
    for signature in document.findall(addnodes.desc_signature):
        policy = policy_of(signature)
        field = policy and policy.model_fields.get(signature["fullname"].rpartition(".")[2])
        if not field:
            continue
        for annotation in list(signature.findall(addnodes.desc_annotation)):
            annotation.parent.remove(annotation)
        default = field.get_default(call_default_factory=True)
        text = " (required)" if field.is_required() else f" (default: {default!r})"
        signature.append(addnodes.desc_annotation("", text))


def policy_of(signature: addnodes.desc_signature) -> type[Policy] | None:
    """Return the policy that a described object belongs to, None if it belongs to none."""
    module = import_module(signature["module"]) if signature.get("module") else None
    kind = getattr(module, signature.get("class", ""), None)
    return kind if isinstance(kind, type) and issubclass(kind, Policy) else None


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt (https://llmstxt.org): a line for each page, in the order of the toctrees."""
    if error or app.builder.format != "html":
        return
    lines = [f"# {project}", "", f"> {PROJECT['description']}"]
    for section in app.env.toctree_includes["index"]:
        lines += ["", f"## {app.env.titles[section].astext()}", ""]
        for page in pages_below(app, section):
            paragraphs = app.env.get_doctree(page).findall(nodes.paragraph)
            first = next((text for each in paragraphs if (text := each.astext())), "")
            sentence = re.split(r"(?<=[.:])\s", " ".join(first.split()))[0].rstrip(":")
            title = app.env.titles[page].astext()
            lines.append(f"- [{title}]({app.builder.get_target_uri(page)}): {sentence or title}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join([*lines, ""]), "utf-8")


def pages_below(app: Sphinx, page: str) -> Iterator[str]:
    """Yield a page, and those of its toctree."""
    yield page
    for below in app.env.toctree_includes.get(page, ()):
        yield from pages_below(app, below)


def setup(app: Sphinx) -> None:
    """Connect the functions; `resolve_links` before Sphinx copies what it takes for downloads."""
    app.connect("doctree-read", resolve_links, priority=100)
    app.connect("doctree-read", show_defaults)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("build-finished", write_llms_txt)
