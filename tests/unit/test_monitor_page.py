"""The files of the monitor's page: built from web/, with their hashes, and nothing loaded from other hosts."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from tools.api_types import TYPES, page_types

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "airflow_provider_jetstream" / "plugins" / "monitor" / "static"
SOURCE = ROOT / "web"
SCRIPTS = sorted((SOURCE / "src").rglob("*.js"))
OWN = [*SCRIPTS, *sorted((SOURCE / "css").glob("*.css")), SOURCE / "page.html"]
ASSETS = json.loads((STATIC / "assets.json").read_text())


@pytest.mark.parametrize("name", ASSETS.values())
def test_the_name_of_a_built_file_has_the_hash_of_its_content(name: str) -> None:
    found = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    assert re.search(r"-([0-9a-f]{12})\.", name)[1] == found  # type: ignore[index]


def test_the_page_loads_one_script_and_one_style() -> None:
    text = (STATIC / "index.html").read_text()
    assert re.findall(r'<script[^>]*src="([^"]+)"', text) == [f"static/{ASSETS['script']}"]
    assert re.findall(r'<link rel="stylesheet" href="([^"]+)"', text) == [f"static/{ASSETS['style']}"]


def test_the_libraries_are_pinned_and_their_licences_shipped() -> None:
    declared = json.loads((SOURCE / "package.json").read_text())
    locked = json.loads((SOURCE / "package-lock.json").read_text())["packages"]
    licences = (STATIC / "libraries.LICENSE").read_text()
    for name, version in {**declared["dependencies"], **declared["devDependencies"]}.items():
        assert locked[f"node_modules/{name}"]["version"] == version, name
        assert locked[f"node_modules/{name}"]["integrity"].startswith("sha512-"), name
    for name, version in declared["dependencies"].items():
        assert f"{name} {version} (" in licences


def test_the_scripts_have_the_types_of_the_api() -> None:
    assert TYPES.read_text() == page_types(), "run make api-types"


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_file_inserts_no_html_and_names_no_other_host(path: Path) -> None:
    text = path.read_text()
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.findall(r"https?://|//cdn|(?:href|src)=\"/", text)


def test_the_page_has_no_inline_script_or_style() -> None:
    text = (STATIC / "index.html").read_text()
    assert not re.findall(r"<style|style=|<script(?![^>]*src=)|\son\w+=", text)
