"""Which rows of a frame the waves of a bulk redrive take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import still_dead
from airflow_provider_jetstream.spark.bulk_redrive.outcomes import CANCELLED, NEEDS_RESCAN
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.schema import SEQUENCE
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import DriverScan
    from airflow_provider_jetstream.spark.bulk_redrive.driver_supervision import DriverSupervision


class WaveRows:
    """The rows of a frame, wave after wave in the order of the letters.

    :param options: connection options of the data source
    :param letters: the frame
    :param selection: of the request
    :raises SparkOptionError: a row has no sequence
    """

    def __init__(self, options: Mapping[str, str], letters: DataFrame, selection: Selection) -> None:
        self._options = options
        self._letters = letters
        self._selection = selection
        found = letters.select(SEQUENCE).distinct().toArrow().column(SEQUENCE)
        if found.null_count:
            raise SparkOptionError(f"expected a {SEQUENCE} in every row, found null: drop rows that are no letters")
        self._rows = SequenceRanges.of(np.sort(found.to_numpy()).tolist())
        self._tried = SequenceRanges()

    def add_outcomes(self, outcomes: pa.Table) -> None:
        """Note which letters a job has tried, whatever became of them."""
        is_open = pc.is_in(outcomes.column("outcome"), pa.array([CANCELLED, NEEDS_RESCAN]))
        tried = outcomes.filter(pc.invert(is_open)).column("sequence").to_pylist()
        self._tried |= SequenceRanges.of(sorted({sequence for sequence in tried if sequence}))

    def next(self, scan: DriverScan, supervision: DriverSupervision) -> tuple[DataFrame, pa.Table] | None:
        """Return the rows that the wave takes now, and the scan's jobs among them; ``None`` where it takes none."""
        report, size = supervision.report, supervision.remaining
        done = self._tried | SequenceRanges.of(sorted({*report.redriven, *report.parked}))
        rows = (self._rows & SequenceRanges.between(0, supervision.until)) - done
        again = supervision.brought_again() - done
        if again:
            # Some of them may have been parked since.
            found = run_on_own_connection(
                self._options, lambda connection: still_dead(connection, scan, list(again), self._selection)
            )
            again = SequenceRanges.of(sorted(found))
        chosen = list(rows | again)[:size]
        if not chosen:
            return None
        jobs = scan.jobs.filter(pc.is_in(scan.jobs.column(SEQUENCE), pa.array(chosen, pa.int64())))
        return self._rows_of([sequence for sequence in chosen if sequence not in again]).unionByName(
            self._frame([sequence for sequence in chosen if sequence in again]), allowMissingColumns=True
        ), jobs

    def _rows_of(self, sequences: list[int]) -> DataFrame:
        return self._letters.join(self._frame(sequences), SEQUENCE, "left_semi")

    def _frame(self, sequences: list[int]) -> DataFrame:
        return self._letters.sparkSession.createDataFrame([(sequence,) for sequence in sequences], f"{SEQUENCE} bigint")
