"""Builds these pages as a site with Sphinx and MyST: ``make site``.

The pages are plain Markdown, written for the repository. Here a table of contents is made of the lists of index.md, and
links to files outside of this folder become links to the repository.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

_DOCS = Path(__file__).resolve().parent
_ROOT = _DOCS.parent
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_REPOSITORY = _PROJECT["urls"]["Repository"]

project = _PROJECT["name"]
release = version = _PROJECT["version"]
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
# Every heading has the anchor that the repository's viewer gives it.
myst_heading_anchors = 4
# For anchors that a page has as HTML.
myst_enable_extensions = ["attrs_inline"]
nitpicky = True

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
_LISTED = re.compile(r"\]\((?P<page>[\w/-]+)\.md\)")
_ANCHOR = re.compile(r'<a id="(?P<id>[\w-]+)"></a>')
_FENCE = re.compile(r"^(?: *)```.*?^(?: *)```$", re.DOTALL | re.MULTILINE)


def _for_site(text: str, page: Path) -> str:
    """Return a page with the links of the site.

    :raises FileNotFoundError: a link leads nowhere
    """

    def link(found: re.Match[str]) -> str:
        target = (page.parent / found["path"]).resolve()
        if not target.exists():
            raise FileNotFoundError(f"expected a file at {found['path']}, to which {page.name} links, found none")
        is_page = target.suffix in (".md", ".png", ".svg") and target.is_relative_to(_DOCS)
        return found[0] if is_page else f"{_address(target)}{found['anchor'] or ''}"

    parts = _FENCE.split(text)
    kept = _FENCE.findall(text)
    parts = [_ANCHOR.sub(r"[]{#\g<id>}", _LINK.sub(link, part)) for part in parts]
    return "".join(part + fence for part, fence in zip(parts, [*kept, ""], strict=True))


def _address(target: Path) -> str:
    kind = "tree" if target.is_dir() else "blob"
    return f"{_REPOSITORY}/{kind}/main/{target.relative_to(_ROOT).as_posix()}"


def _contents(index: str) -> str:
    """Return hidden tables of contents: one for each section of the index, in its order."""
    parts = []
    for section in index.split("\n## ")[1:]:
        caption, _, body = section.partition("\n")
        pages = dict.fromkeys(found["page"] for found in _LISTED.finditer(body))
        if pages:
            parts.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```")
    return "\n\n".join(parts)


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(name))
    text = source[0]
    source[0] = _for_site(text, page)
    if name == "index":
        source[0] += f"\n\n{_contents(text)}\n"


def _note_anchors(app: Sphinx, document: nodes.document) -> None:
    """Let links of other pages find the anchors that a page has besides its headings'."""
    slugs = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for anchor in _ANCHOR.findall(Path(app.env.doc2path(app.env.docname)).read_text(encoding="utf-8")):
        slugs[anchor] = (0, anchor, "")


def setup(app: Sphinx) -> None:
    """Connect the changes of pages and links."""
    app.connect("source-read", _read)
    app.connect("doctree-read", _note_anchors)
