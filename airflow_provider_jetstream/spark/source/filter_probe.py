"""Detects whether the Spark at hand honours pushed filters: whether each scan of a data frame has its own.

Spark 4.3 uses a scan that one query has narrowed for a later query of the same data frame again, whose rows are then
missing without an error. So a small source of three rows is queried in this way before filters are pushed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, LessThan
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import Filter, InputPartition
    from pyspark.sql.types import StructType

FILTER_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_ROWS = 3


class _ProbeReader(DataSourceReader):
    def __init__(self) -> None:
        self._end = _ROWS

    @override
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._end = min([self._end, *(condition.value for condition in filters if isinstance(condition, LessThan))])
        return filters

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return ((number,) for number in range(self._end))


class _ProbeSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "jetstream_filter_probe"

    def schema(self) -> str:
        return "number int"

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        return _ProbeReader()


def honours_filters(session: SparkSession) -> bool:
    """Return whether filters may be pushed in a session; takes two small queries where they are enabled at all."""
    if session.conf.get(FILTER_PUSHDOWN, "false") != "true":
        return False
    session.dataSource.register(_ProbeSource)
    numbers = session.read.format(_ProbeSource.name()).load()
    narrowed = numbers.where("number < 1").union(numbers.where("number < 2"))
    return narrowed.count() == 1 + 2 and numbers.count() == _ROWS
