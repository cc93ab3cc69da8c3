"""The pages about the commands, from their parsers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.command.program import command_parser
from airflow_provider_jetstream.worker import cli
from tools.reference.docstrings import attribute_texts
from tools.reference.markdown import code, heading, join, table

if TYPE_CHECKING:
    from collections.abc import Iterator

# Every sub-command that needs a server has these; they have a section of their own.
_CONNECTION = "connection"


class Command(NamedTuple):
    """A sub-command without further ones below it.

    :param name: as it is typed, with the program
    """

    name: str
    text: str
    parser: argparse.ArgumentParser

    @property
    def options(self) -> list[argparse.Action]:
        """Its options and arguments, without those about the connection and help."""
        connection = _group(self.parser, _CONNECTION)
        return [
            action
            for action in self.parser._actions  # noqa: SLF001 - argparse has no other way to list them.
            if action not in connection and not isinstance(action, argparse._HelpAction)  # noqa: SLF001
        ]


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command line by its page."""
    return {"jetstream-queue.md": command_parser(), "jetstream-worker.md": cli._parser()}  # noqa: SLF001


def command_page(file: str) -> str:
    """Return the page of a command line."""
    parser = parsers()[file]
    commands = list(commands_of(parser))
    connection = next((found for command in commands if (found := _group(command.parser, _CONNECTION))), [])
    return join(
        [
            heading(1, parser.prog),
            parser.description or "",
            "Guide: " + ("[workers](../worker.md)." if "worker" in file else "[command line](../command-line.md)."),
            *(_section(command) for command in commands),
            *([heading(2, "Connection options"), _table(connection)] if connection else []),
            *(_exit_codes() if parser.prog == "jetstream-queue" else []),
        ]
    )


def commands_of(parser: argparse.ArgumentParser, text: str = "") -> Iterator[Command]:
    """Yield the sub-commands of a parser, those of sub-commands included."""
    choices = [
        action
        for action in parser._actions  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
    ]
    if not choices:
        yield Command(parser.prog, text, parser)
    for choice in choices:
        texts = {shown.dest: shown.help or "" for shown in choice._choices_actions}  # noqa: SLF001
        for name, below in choice.choices.items():
            yield from commands_of(below, texts.get(name, ""))


def command_problems() -> list[str]:
    """Return what the reference lacks about commands."""
    found = []
    for parser in parsers().values():
        for command in commands_of(parser):
            found += [] if command.text else [f"{command.name}: no text"]
            found += [f"{command.name} {_name(option)}: no help" for option in command.options if not option.help]
    return found


def _section(command: Command) -> str:
    text = command.text[:1].upper() + command.text[1:]
    has_connection = bool(_group(command.parser, _CONNECTION))
    return join(
        [
            heading(2, command.name),
            f"{text.rstrip('.')}." if text else "",
            _table(command.options),
            "It takes the [connection options](#connection-options) too." if has_connection else "",
        ]
    )


def _table(options: list[argparse.Action]) -> str:
    rows = [[code(_name(option)), _form(option), _default(option), _help(option)] for option in options]
    return table(["option or argument", "takes", "default", "meaning"], rows) if rows else ""


def _name(option: argparse.Action) -> str:
    if option.option_strings:
        return ", ".join(option.option_strings)
    name = option.metavar or option.dest
    return f"{name if isinstance(name, str) else ' '.join(name)}{'…' if option.nargs in ('*', '+') else ''}"


def _form(option: argparse.Action) -> str:
    if option.choices:
        return ", ".join(code(choice) for choice in option.choices)
    if option.nargs == 0:
        return "nothing"
    value = option.metavar or (option.dest.upper() if option.option_strings else "")
    needed = " (required)" if option.required and option.option_strings else ""
    repeated = " (several times)" if isinstance(option, argparse._AppendAction) else ""  # noqa: SLF001
    return f"{code(value) if value else 'text'}{needed}{repeated}"


def _default(option: argparse.Action) -> str:
    is_plain = option.default not in (None, False, argparse.SUPPRESS) and option.default != []
    return code(option.default) if is_plain else ""


def _help(option: argparse.Action) -> str:
    return (option.help or "") % (vars(option) | {"prog": ""})


def _group(parser: argparse.ArgumentParser, title: str) -> list[argparse.Action]:
    groups = parser._action_groups  # noqa: SLF001
    return [action for group in groups if group.title == title for action in group._group_actions]  # noqa: SLF001


def _exit_codes() -> list[str]:
    texts = attribute_texts(ExitCode)
    rows = [[str(int(value)), texts.get(value.name, "")] for value in ExitCode]
    return [heading(2, "Exit codes"), table(["code", "meaning"], rows)]
