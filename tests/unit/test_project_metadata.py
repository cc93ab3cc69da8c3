"""What a registry and the repository's host show: addresses, classifiers, and the forms for issues and changes."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from testbed.code_blocks import ROOT
from tools.matrix.versions import PYTHONS

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = CONFIG["project"]
README: dict[str, Any] = CONFIG["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
HOST = ROOT / ".github"
FORMS = sorted((HOST / "ISSUE_TEMPLATE").glob("*.yml"))


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


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_the_host_requires(path: Any) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form == {"blank_issues_enabled": False}
        return
    assert {"name", "description", "body"} <= form.keys()
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    names = [part["id"] for part in questions]
    assert names
    assert len(names) == len(set(names))
    assert {part["type"] for part in questions} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(part["attributes"]["label"] for part in questions)
    # YAML reads no and yes without quotes as truth values, which the host refuses.
    options = [option for part in questions for option in part["attributes"].get("options", ())]
    assert all(isinstance(option, str) for option in options)


def test_the_form_for_changes_names_targets_and_files_that_exist() -> None:
    text = (HOST / "PULL_REQUEST_TEMPLATE.md").read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    named = set(re.findall(r"`make ([a-z-]+)`", text))
    assert named
    assert named <= targets
    assert [file for file in re.findall(r"`([\w/]+\.md)`", text) if not (ROOT / file).exists()] == []
