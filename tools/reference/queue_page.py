"""The page about the fields of a queue's declaration, from its models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import Archive, Audit, Consumer, DeadLetterQueue, Events, Retention, WorkQueue
from airflow_provider_jetstream.jetstream.queue.declaration import Declaration, Stream
from tools.reference.arguments import Argument, class_arguments
from tools.reference.docstrings import own_docstring
from tools.reference.entries import argument_table, method_table
from tools.reference.markdown import heading, join, plain

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = "queue-fields.md"
MODELS = (WorkQueue, Consumer, DeadLetterQueue, Retention, Events, Archive, Audit)
_INTRO = (
    "The declaration of a queue in Python, as a dict or as YAML ([guide](../queue.md);"
    " [JSON Schema](../contract/queue.schema.json) for editors). Import the models from"
    " `airflow_provider_jetstream.jetstream`."
)
_UNITS = (
    "`Duration` is text such as `30s`, `1h30m` or `7d`, or nanoseconds. `Size` is text such as `256MB` (powers of"
    " 1024), or bytes. `Text` is text that UTF-8 can encode. A field with the default `None` gets the server's default"
    " in a new stream, and keeps its value in an existing one."
)
_STREAM = "Fields of every stream"


def queue_page(links: Mapping[str, str]) -> str:
    """Return the page."""
    return join(
        [
            heading(1, "Fields of a queue"),
            _INTRO,
            _UNITS,
            *(_section(model, links) for model in MODELS),
            heading(2, _STREAM),
            argument_table(_fields(Stream), links, FILE, "field"),
        ]
    )


def field_problems() -> list[str]:
    """Return what the reference lacks about fields."""
    return [
        f"{model.__name__}: {problem}"
        for model in (*MODELS, Stream)
        for field in _fields(model)
        for problem in field.problems
    ]


def _section(model: type[Declaration], links: Mapping[str, str]) -> str:
    return join(
        [
            heading(2, model.__name__),
            plain(own_docstring(model).text, links, FILE),
            argument_table(_fields(model), links, FILE, "field"),
            "The other fields are [those of every stream](#fields-of-every-stream)."
            if issubclass(model, Stream)
            else "",
            method_table(model, links, FILE),
        ]
    )


def _fields(model: type[Declaration]) -> list[Argument]:
    """Return the fields that a model declares or describes itself, rather than those of every stream."""
    own = vars(model)["__annotations__"].keys() | own_docstring(model).arguments.keys()
    return [field for field in class_arguments(model) if field.name in own]
