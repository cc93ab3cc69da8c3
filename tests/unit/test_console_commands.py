"""Each command of the pages' console blocks is run by a test that exists, and each extra that a text names installs."""

from __future__ import annotations

import re
import tomllib
from collections import Counter

from testbed.code_blocks import ROOT, pages
from testbed.command_tests import TESTS, beginning_of
from testbed.console import commands

_EXTRAS = re.compile(r"(?:airflow-provider-jetstream|\{ROOT\}|\{build_wheel\(\)\}|\{wheel\})\[([\w, ]+)\]")
# What installs the wheel, or the project, into environments of its own.
_INSTALLERS = [*ROOT.glob("tests/environment/*.py"), *ROOT.glob("testbed/*.py"), *ROOT.glob("tools/*.py")]


def test_each_command_is_run_by_a_test() -> None:
    assert [str(command) for command in commands() if beginning_of(command) is None] == []


def test_each_line_of_the_table_is_about_a_command() -> None:
    used = Counter((command.page, beginning_of(command)) for command in commands())
    assert [(page, beginning) for page in TESTS for beginning in TESTS[page] if not used[page, beginning]] == []


def test_each_extra_that_a_text_names_is_installed_by_a_test() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    sources = (ROOT / "airflow_provider_jetstream").rglob("*.py")
    named = {
        (text, extra)
        for text in [*pages(), *(path.relative_to(ROOT).as_posix() for path in sources)]
        for found in _EXTRAS.findall((ROOT / text).read_text(encoding="utf-8"))
        for extra in re.split(r", *", found)
    }
    assert {extra for _, extra in named} >= {"airflow", "command", "dev", "metrics", "patch", "spark"}
    installed = {
        extra
        for path in _INSTALLERS
        for found in _EXTRAS.findall(path.read_text(encoding="utf-8"))
        for extra in re.split(r", *", found)
    }
    assert sorted(each for each in named if each[1] not in extras) == []
    assert sorted(each for each in named if each[1] not in installed) == []
    assert sorted(extras - installed) == []
