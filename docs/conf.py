"""Settings of the documentation site: `make docs` builds it with Sphinx.

The pages are Markdown that also reads well in the repository. Their relative links lead to pages
of the site, and links to other files of the repository to its URL (`resolve_links`).
"""

import os
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

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
extensions = ["myst_parser", "sphinx_copybutton"]
nitpicky = True
copybutton_exclude = ".linenos, .gp, .go"  # of a session, only its commands are copied

# Markdown

myst_heading_anchors = 4  # with the slugs of GitHub
myst_links_external_new_tab = False

# Theme. All of its files are on the site: fonts, styles and scripts too.

html_theme = "pydata_sphinx_theme"
html_title = "rpcwheel"
html_show_sourcelink = False
html_copy_source = False
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


def setup(app: Sphinx) -> None:
    """Connect `resolve_links`, before Sphinx copies the files that it takes for downloads."""
    app.connect("doctree-read", resolve_links, priority=100)
