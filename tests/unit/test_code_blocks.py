"""Every code block of the README and of docs parses, and names only what exists. tests/server runs those it can."""

from __future__ import annotations

import ast
import builtins
import configparser
import importlib
import importlib.util
import json
import re
import shlex
import tomllib
from typing import TYPE_CHECKING

import pytest
import yaml

from airflow_provider_jetstream.command import program as queue_program
from airflow_provider_jetstream.jetstream.dead_letters import record
from airflow_provider_jetstream.worker import cli
from testbed.code_blocks import ROOT, CodeBlock, code_blocks, pages

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable

_DATA: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "yaml": yaml.safe_load,
    "ini": configparser.ConfigParser().read_string,
    "toml": tomllib.loads,
}
# Text that is no language's; SQL, which only Spark can parse; and Go, whose block is a part of a program: its headers
# are compared.
_OTHER = {"python", "console", "go", "sql", "text"}

_FACES = {f"airflow_provider_jetstream.{face}" for face in ("jetstream", "worker", "spark")}
_AIRFLOW_MODULES = {
    f"airflow_provider_jetstream.{module}"
    for module in (
        "assets.stream_asset",
        "hooks.jetstream",
        "notifications.jetstream",
        "operators.cancel",
        "operators.consume",
        "operators.provision",
        "operators.publish",
        "operators.redrive",
        "operators.spark",
        "plugins.monitor",
        "reprocessing",
        "sensors.dead_letter",
        "sensors.jobs",
        "sensors.queue",
        "testing",
        "triggers.completion",
        "triggers.dead_letter",
        "triggers.message",
        "triggers.queue",
    )
}

# Names that a page's reader has already: an open connection, a queue, a Spark session, functions of a handler's own.
_GIVEN = {"connection", "queue", "spark", "bank_is_open", "fetch"}


def _imported(block: CodeBlock) -> list[tuple[str, str | None]]:
    names: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Import):
            names += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [(node.module or "", alias.name) for alias in node.names]
    return names


def _bound(tree: ast.AST) -> set[str]:
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound


def _used(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def test_every_block_names_its_language() -> None:
    blocks = code_blocks()
    # No fence is lost to a pattern that doesn't match it.
    fences = sum(line.lstrip().startswith("```") for page in pages() for line in (ROOT / page).read_text().splitlines())
    assert 2 * len(blocks) == fences
    assert [f"{block}: {block.language!r}" for block in blocks if block.language not in _DATA.keys() | _OTHER] == []


def test_data_parses() -> None:
    for block in code_blocks(*_DATA):
        try:
            _DATA[block.language](block.code)
        except (ValueError, yaml.YAMLError, configparser.Error) as error:
            pytest.fail(f"{block}: {error}")


def test_python_compiles() -> None:
    for block in code_blocks("python"):
        compile(block.numbered_code, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_python_imports_public_names_that_exist() -> None:
    unknown = []
    for block in code_blocks("python"):
        for module, name in _imported(block):
            own = module.partition(".")[0] == "airflow_provider_jetstream"
            if own and module not in _FACES | _AIRFLOW_MODULES:
                unknown.append(f"{block}: {module} isn't public")
            imported = importlib.import_module(module)
            if name and not hasattr(imported, name):
                unknown.append(f"{block}: {module} has no {name}")
            if module in _FACES and name not in imported.__all__:
                unknown.append(f"{block}: {name} isn't on the face of {module}")
    assert unknown == []


def test_python_uses_names_that_its_page_defines() -> None:
    known: dict[str, set[str]] = {}
    unknown = []
    for block in code_blocks("python"):
        tree = ast.parse(block.code)
        names = known.setdefault(block.page, _GIVEN | set(dir(builtins)))
        names |= _bound(tree)
        unknown += [f"{block}: {name}" for name in sorted(_used(tree) - names)]
    assert unknown == []


def _commands(block: CodeBlock) -> list[list[str]]:
    lines = block.code.replace("\\\n", " ").splitlines()
    return [shlex.split(command, comments=True) for line in lines for command in line.split("&&")]


def _parses(parser: ArgumentParser, arguments: list[str]) -> bool:
    try:
        parser.parse_args(arguments)
    except SystemExit:
        return False
    return True


def test_commands_have_the_targets_options_and_modules_that_they_name() -> None:
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    unknown = []
    tried = set()
    for block in code_blocks("console"):
        for command in _commands(block):
            words = [word for word in command if not re.fullmatch(r"[A-Z_]+=.*", word, re.DOTALL)]
            if not words:
                continue
            program, *arguments = words
            tried.add(program)
            match program:
                case "make":
                    right = set(arguments) <= targets
                case "jetstream-worker":
                    right = _parses(cli._parser(), arguments)  # noqa: SLF001 - The parser is the command's face.
                case "jetstream-queue":
                    right = _parses(queue_program.command_parser(), arguments)
                case "python" if arguments[0] == "-m":
                    right = importlib.util.find_spec(arguments[1]) is not None
                case "pip":
                    named = re.findall(r"airflow-provider-jetstream\[([\w,]+)\]", " ".join(arguments))
                    right = {extra for extras_ in named for extra in extras_.split(",")} <= extras
                case _:
                    right = True
            if not right:
                unknown.append(f"{block}: {shlex.join(words)}")
    assert unknown == []
    assert {"make", "jetstream-worker", "pip", "python"} <= tried


def test_records_written_in_other_languages_have_the_headers_of_the_contract() -> None:
    known = {value for value in vars(record).values() if isinstance(value, str)}
    headers = {
        header
        for block in code_blocks("go", "console")
        for header in re.findall(r"Dead-Letter-[A-Z][\w-]*", block.code)
    }
    assert headers
    assert headers <= known
