"""The files of the monitor's page: pinned libraries, small modules, nothing loaded from other hosts."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from testbed.vendoring import MANIFEST, VENDOR, sha256, vendored

if TYPE_CHECKING:
    from pathlib import Path

STATIC = VENDOR.parent
SCRIPTS = sorted([*(STATIC / "app").rglob("*.js"), *(STATIC / "host").rglob("*.js")])
OWN = [*SCRIPTS, *sorted((STATIC / "css").glob("*.css")), STATIC / "index.html"]
LIBRARIES = {name: file for _, name, file in vendored(json.loads(MANIFEST.read_text()))}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_has_the_pinned_digest(name: str) -> None:
    assert sha256((VENDOR / name).read_bytes()) == LIBRARIES[name]["sha256"]


def test_every_library_is_pinned_and_has_its_licence() -> None:
    assert {path.name for path in VENDOR.iterdir()} == {*LIBRARIES, MANIFEST.name}
    for package in json.loads(MANIFEST.read_text())["packages"]:
        assert any(file["from"] == "LICENSE" for file in package["files"].values()), package["name"]
        assert package["integrity"].startswith("sha512-")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_has_a_comment_and_imports_existing_files(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 300
    assert text.startswith("/** ")
    for imported in re.findall(r'from "([^"]+)"', text):
        assert imported.startswith("."), imported
        assert (path.parent / imported).is_file(), imported


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_file_inserts_no_html_and_names_no_other_host(path: Path) -> None:
    text = path.read_text()
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.findall(r"https?://|//cdn|(?:href|src)=\"/", text)


def test_the_page_has_no_inline_script_or_style() -> None:
    text = (STATIC / "index.html").read_text()
    assert not re.findall(r"<style|style=|<script(?![^>]*src=)|\son\w+=", text)
