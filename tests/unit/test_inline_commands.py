"""Each command line that a page or a text of the package quotes exists, with its options."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from airflow_provider_jetstream.command import program as queue_program
from airflow_provider_jetstream.worker import cli
from testbed.code_blocks import ROOT, pages

if TYPE_CHECKING:
    from collections.abc import Iterator

# The changelog also names what there was.
_PAGES = [page for page in pages() if page != "CHANGELOG.md"]
_TEXTS = [
    *_PAGES,
    *(
        path.relative_to(ROOT).as_posix()
        for folder in ("airflow_provider_jetstream", "example_dags", "example_workers")
        for path in (ROOT / folder).rglob("*.py")
    ),
]
_QUOTED = re.compile(r"(?<!`)(`{1,2})(jetstream-(?:queue|worker)) ([^`]+?)\1(?!`)")
_END = re.compile(r"--$|\||>|&&|;")
_PARSERS = {"jetstream-queue": queue_program.command_parser(), "jetstream-worker": cli._parser()}  # noqa: SLF001 - The parser is the command's face.


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:  # noqa: SLF001 - Nothing public lists a parser's commands.
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            return dict(action.choices)
    return {}


def _unknown(program: str, words: list[str]) -> Iterator[str]:
    parser = _PARSERS[program]
    options = set(parser._option_string_actions)  # noqa: SLF001
    for word in words:
        if _END.search(word):
            return
        if word.startswith("-"):
            if word.partition("=")[0] not in options:
                yield word
        elif commands := _commands(parser):
            if word not in commands:
                yield word
                return
            parser = commands[word]
            options |= set(parser._option_string_actions)  # noqa: SLF001


def test_each_quoted_command_exists() -> None:
    unknown = [
        f"{text}: {program} {line}: {word}"
        for text in _TEXTS
        for _, program, line in _QUOTED.findall((ROOT / text).read_text(encoding="utf-8"))
        for word in _unknown(program, line.split())
    ]
    assert unknown == []


def test_quotes_are_found_and_an_unknown_command_or_option_is() -> None:
    assert [found[1:] for found in _QUOTED.findall("a `jetstream-queue queues`, ``jetstream-worker run``")] == [
        ("jetstream-queue", "queues"),
        ("jetstream-worker", "run"),
    ]
    assert list(_unknown("jetstream-queue", ["provision", "x"])) == ["provision"]
    assert list(_unknown("jetstream-queue", ["queue", "apply", "f.yaml", "--colour"])) == ["--colour"]
    assert list(_unknown("jetstream-worker", ["--consumer", "high"])) == ["--consumer", "high"]
    assert list(_unknown("jetstream-worker", ["conform", "--", "node", "--yes"])) == []
