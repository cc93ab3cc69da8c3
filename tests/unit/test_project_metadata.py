"""What a registry and the repository's host show: addresses, classifiers, and the forms for issues and changes."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from testbed.code_blocks import ROOT
from tools.matrix.versions import PYTHONS

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = CONFIG["project"]
README: dict[str, Any] = CONFIG["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]


def on_a_registry(text: str) -> str:
    for substitution in README["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    return text.replace("$HFPR_VERSION", PROJECT["version"])


def test_all_addresses_are_in_one_repository() -> None:
    repository = PROJECT["urls"]["Repository"]
    replacements = [substitution["replacement"] for substitution in README["substitutions"]]
    addresses = [*PROJECT["urls"].values(), *(text.partition("(")[2] for text in replacements)]
    assert [address for address in addresses if not address.startswith(repository)] == []
    files = {address.partition("/blob/main/")[2] for address in PROJECT["urls"].values()} - {""}
    assert len(files) == 3
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_links_and_pictures_of_the_readme_lead_to_the_tag_of_the_release() -> None:
    repository, tag = PROJECT["urls"]["Repository"], f"v{PROJECT['version']}"
    link, picture = f"{repository}/blob/{tag}/docs/a.md#b", f"{repository}/raw/{tag}/e/f.png"
    assert on_a_registry("[a](docs/a.md#b), ![c `d`](e/f.png), [g](https://h.org), [i](#j)") == (
        f"[a]({link}), ![c `d`]({picture}), [g](https://h.org), [i](#j)"
    )
    shown = on_a_registry((ROOT / "README.md").read_text(encoding="utf-8"))
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", shown) == []


def test_classifiers_name_the_versions_of_python_that_are_tried() -> None:
    named = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert named == [*PYTHONS]
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
