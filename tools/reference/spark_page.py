"""The page about the options of Spark's data source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import ConnectionSettings
from airflow_provider_jetstream.jetstream.client.settings_sources import VARIABLES as ENVIRONMENT
from airflow_provider_jetstream.spark.connection_options import NAMED_CONNECTION, VARIABLES
from airflow_provider_jetstream.spark.source.option_names import OPTION_NAMES
from airflow_provider_jetstream.spark.source.option_texts import OPTION_TEXTS
from tools.reference.arguments import class_arguments
from tools.reference.markdown import code, heading, join, plain, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.spark.source.option_names import Purpose

_PURPOSES: tuple[Purpose, ...] = ("read", "readStream", "write", "writeStream")
_CONNECTION = (
    "Give these, or `connection`, or neither: then the environment variables `NATS_URL`, `NATS_USER`… count"
    " ([rules](../spark.md#connection))."
)
# Spark's own, which it passes to the sink.
_OF_SPARK = ("checkpointLocation", "queryName")


def spark_page() -> str:
    """Return the page."""
    reading = [*OPTION_NAMES["read"], *OPTION_NAMES["readStream"]]
    writing = [name for name in OPTION_NAMES["writeStream"] if name not in reading]
    both = [name for name in (*NAMED_CONNECTION, "stream") if name in OPTION_TEXTS]
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
            _table(name for name in dict.fromkeys(reading) if name in OPTION_TEXTS and name not in both),
            heading(2, "Writing"),
            _table(name for name in writing if name in OPTION_TEXTS),
        ]
    )


def connection_rows() -> list[list[str]]:
    """Return the options that fill the settings of a connection."""
    fields = {suffix: field for field, suffix in ENVIRONMENT.items()}
    texts = {argument.name: argument.text for argument in class_arguments(ConnectionSettings)}
    return [[code(option), code(suffix), plain(texts[fields[suffix]], {})] for option, suffix in VARIABLES.items()]


def option_problems() -> list[str]:
    """Return what the reference lacks about options."""
    known = {name for names in OPTION_NAMES.values() for name in names}
    described = OPTION_TEXTS.keys() | VARIABLES.keys() | set(_OF_SPARK)
    found = [f"{name}: no text" for name in known - described]
    return found + [f"{name}: a text and no such option" for name in described - known]


def _table(names: Iterable[str]) -> str:
    rows = []
    for name in names:
        option = OPTION_TEXTS[name]
        purposes = [purpose for purpose in _PURPOSES if name in OPTION_NAMES[purpose]]
        default = code(option.default) if option.default else ""
        shown = ", ".join(map(code, purposes))
        rows.append([code(name), shown, plain(option.form, {}), default, plain(option.text, {})])
    return table(["option", "for", "takes", "default", "meaning"], rows)
