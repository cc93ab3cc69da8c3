"""The page about the options of Spark's data source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import ConnectionSettings
from airflow_provider_jetstream.jetstream.client.settings import VARIABLES as ENVIRONMENT
from airflow_provider_jetstream.spark.connection_options import NAMED_CONNECTION, VARIABLES
from airflow_provider_jetstream.spark.source.options import OF_SPARK, OPTIONS, option_names
from tools.reference.arguments import class_arguments
from tools.reference.markdown import code, heading, join, plain, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.spark.source.options import Purpose

_PURPOSES: tuple[Purpose, ...] = ("read", "readStream", "write", "writeStream")
_CONNECTION = (
    "Give these, or `connection`, or neither: then the environment variables `NATS_URL`, `NATS_USER`… count"
    " ([rules](../spark.md#connection))."
)


def spark_page() -> str:
    """Return the page."""
    reading = option_names("load")
    writing = [name for name in option_names("writeStream") if name not in reading]
    both = [name for name in (*NAMED_CONNECTION, "stream") if name in OPTIONS]
    return join(
        [
            heading(1, "Options of the format jetstream"),
            "Names may be in any case; an unknown option is refused. The guide is [Spark](../spark.md).",
            heading(2, "Connection"),
            _CONNECTION,
            table(["option", "variable, after `NATS_` or `NATS_<NAME>_`", "meaning"], connection_rows()),
            heading(2, "Reading and writing"),
            _table(both),
            heading(2, "Reading"),
            _table(name for name in dict.fromkeys(reading) if name in OPTIONS and name not in both),
            heading(2, "Writing"),
            _table(name for name in writing if name in OPTIONS),
        ]
    )


def connection_rows() -> list[list[str]]:
    """Return the options that fill the settings of a connection."""
    fields = {suffix: field for field, suffix in ENVIRONMENT.items()}
    texts = {argument.name: argument.text for argument in class_arguments(ConnectionSettings)}
    return [[code(option), code(suffix), plain(texts[fields[suffix]], {})] for option, suffix in VARIABLES.items()]


def option_problems() -> list[str]:
    """Return what the reference lacks about options."""
    known = {name for purpose in _PURPOSES for name in option_names(purpose)}
    described = OPTIONS.keys() | VARIABLES.keys() | set(OF_SPARK)
    found = [f"{name}: no text" for name in known - described]
    return found + [f"{name}: a text and no such option" for name in described - known]


def _table(names: Iterable[str]) -> str:
    rows = []
    for name in names:
        option = OPTIONS[name]
        default = code(option.default) if option.default else ""
        shown = ", ".join(map(code, option.purposes))
        rows.append([code(name), shown, plain(option.form, {}), default, plain(option.text, {})])
    return table(["option", "for", "takes", "default", "meaning"], rows)
