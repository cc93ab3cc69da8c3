"""The documentation as a site: the strict build succeeds, and finds links that lead nowhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest

from testbed.environments import ROOT, find_uv

if TYPE_CHECKING:
    from pathlib import Path

DOCS = ROOT / "docs"
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    program = [str(find_uv()), "run", "--quiet", "--isolated", "--locked", "--only-group", "docs", "sphinx-build"]
    strict = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "--builder", "html"]
    command = [*program, *strict, str(docs), str(site)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = build(DOCS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert {page for page in pages if not (tmp_path / page).exists()} == set()
    anchors = {
        (path.relative_to(DOCS).with_suffix(".html"), anchor)
        for path in DOCS.rglob("*.md")
        for anchor in re.findall(r'<a id="[\w-]+">', path.read_text(encoding="utf-8"))
    }
    assert anchors
    assert {
        (page, anchor)
        for page, anchor in anchors
        if anchor.removeprefix("<a ").rstrip(">") not in (tmp_path / page).read_text(encoding="utf-8")
    } == set()
    # A file outside of the folder.
    links = {
        link
        for page in pages
        for link in re.findall(r'<a [^>]*href="([^"]+)"', (tmp_path / page).read_text(encoding="utf-8"))
    }
    assert f"{REPOSITORY}/blob/main/example_dags/queues/orders.yaml" in links
    assert f"{REPOSITORY}/tree/main/docs/contract" in links
    assert {
        link for link in links if link.partition("#")[0].endswith(".md") and not link.startswith(REPOSITORY)
    } == set()


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("nothing.md", "nothing.md"),
        ("page.md#nothing", "'nothing'"),
        ("#nothing", "'nothing'"),
        ("../program.py", "../program.py"),
    ],
)
def test_a_link_that_leads_nowhere_is_an_error(link: str, problem: str, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(DOCS / "conf.py", docs)
    (docs / "index.md").write_text("# Index\n\n## Pages\n\n- [A page](page.md)\n")
    (docs / "page.md").write_text(f"# Page\n\n[A link]({link})\n")
    done = build(docs, tmp_path / "site")
    assert done.returncode
    assert problem in done.stderr
