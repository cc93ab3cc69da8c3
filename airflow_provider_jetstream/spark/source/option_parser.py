"""Reads single options, and names the option in the error where a value is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.key_columns import BUCKET_STREAM
from airflow_provider_jetstream.spark.source.option_names import require_known
from airflow_provider_jetstream.spark.source.option_values import (
    Bound,
    bound,
    bucket_name,
    is_object,
    nanoseconds,
    object_of,
    stream_name,
    token,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow_provider_jetstream.spark.source.option_names import Purpose

_Value = TypeVar("_Value")
_Default = TypeVar("_Default")


@dataclass(frozen=True)
class PerStream(Generic[_Value]):
    """The value of an option that may be one for each stream.

    :param option: its name
    :param default: of streams that aren't named
    :param named: by the streams' names; none where there is one value for all
    """

    option: str
    default: _Value
    named: Mapping[str, _Value] | None = None

    def of(self, stream: str) -> _Value:
        """Return the value of a stream."""
        return (self.named or {}).get(stream, self.default)


class OptionParser:
    """The options of one reader or writer; their names may be in any case.

    :raises SparkOptionError: there are none, or one isn't known, or two exclude each other
    """

    def __init__(self, options: Mapping[str, str], purpose: Purpose) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        require_known(options, purpose)
        if not options:
            raise SparkOptionError(
                "expected the option stream, found no options: Spark passes a Python data source none of a table's own,"
                " so give them with the query (FROM jobs WITH (stream 'orders', …), INSERT INTO jobs WITH (…)), or make"
                " a temporary view"
            )
        self.require_one_of("jsDomain", "apiPrefix")
        # Used by the connection; what is wrong with them is reported with the other options.
        self.read("jsDomain", token, default=None)
        self.read("apiPrefix", token, default=None)

    def stream(self) -> str:
        """Return the name of the only stream."""
        self.require_one_of("stream", "bucket")
        if self.has("bucket"):
            return BUCKET_STREAM + self.read("bucket", bucket_name, default="")
        if not self.has("stream"):
            raise SparkOptionError("expected the option stream, found none: name the stream to read or to write")
        return self.read("stream", stream_name, default="")

    def has(self, name: str) -> bool:
        """Return whether an option is given."""
        return name.lower() in self._options

    def require_one_of(self, *names: str) -> None:
        """Refuse two options of which there may be one."""
        given = [name for name in names if self.has(name)]
        if len(given) > 1:
            raise SparkOptionError(f"expected {given[0]} or {given[1]}, found both: keep one")

    def bound(self, which: str, default: str) -> PerStream[Bound]:
        """Read where reading starts or ends, by offset or by time."""
        offsets, timestamp = f"{which}Offsets", f"{which}Timestamp"
        self.require_one_of(offsets, timestamp)
        if self.has(timestamp):
            return self.per_stream(timestamp, lambda text: Bound(time=nanoseconds(text)), Bound(extreme=default))
        return self.per_stream(offsets, bound, Bound(extreme=default))

    def per_stream(self, name: str, convert: Callable[[str], _Value], default: _Value) -> PerStream[_Value]:
        """Read an option that may be a JSON object with a value for each stream."""
        if is_object(self._options.get(name.lower(), "")):
            return PerStream(name, default, self.read(name, object_of(convert), default=None))
        return PerStream(name, self.read(name, convert, default=default))

    def read(self, name: str, convert: Callable[[str], _Value], *, default: _Default) -> _Value | _Default:
        """Read an option.

        :raises SparkOptionError: naming the option, what was expected and what was found
        """
        if not self.has(name):
            return default
        value = self._options[name.lower()]
        try:
            return convert(value)
        except ValueError as error:
            problem = str(error) if "found" in str(error) else f"{error}, found {value!r}"
            raise SparkOptionError(f"{name}: {problem}") from None
