"""What a task tells of the streams that it read and wrote: in the events of its assets, and to OpenLineage.

An operator declares no asset by itself. Airflow fails a task with an asset that isn't active, such as where two DAGs
give one URI two names, and each asset makes an event with each run. Lineage needs no declaration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from airflow.sdk import Asset

from airflow_provider_jetstream.assets.stream_asset import SCHEME, StreamAddress, dataset_names
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.tasks.outcome import json_result
from airflow_provider_jetstream.tasks.queue_source import load_queue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_RANGES = 100


class StreamUse(NamedTuple):
    """The streams that a task read and wrote.

    :param written: with the number of messages, where it is known
    """

    read: Sequence[str] = ()
    written: Sequence[tuple[str, int | None]] = ()


class TaskAssets:
    """Part of an operator on a work queue: fills the events of its outlets, and reports its lineage."""

    # The fields of a task's result that its assets' events have too.
    event_fields: Sequence[str] = ()
    work_queue: Any
    nats_conn_id: str
    _work: Mapping[str, Any] | None = None

    def stream_use(self, queue: WorkQueue, work: Mapping[str, Any]) -> StreamUse:
        """Return which streams the task used.

        :param work: what :meth:`note_work` was given
        """
        raise NotImplementedError

    def note_work(self, work: Mapping[str, Any]) -> None:
        """Note what the task has done; the last note counts."""
        self._work = work

    def post_execute(self, context: Context, result: Any = None) -> None:
        """Say in the events of the task's outlets what it did; called by Airflow."""
        super().post_execute(context, result)  # type: ignore[misc]
        if self._work is None:
            return
        for asset in self._stream_assets():
            accessor = context["outlet_events"][asset]
            accessor.extra = {**self._event(context, self._work), **accessor.extra}

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage[Any, Any]:
        """Return the lineage of the task; called by Airflow's provider for OpenLineage."""
        from airflow.providers.common.compat.openlineage.facet import (
            InputDataset,
            OutputDataset,
            OutputStatisticsOutputDatasetFacet,
        )
        from airflow.providers.openlineage.extractors import OperatorLineage

        if self._work is None:
            return OperatorLineage()
        use = self.stream_use(load_queue(self.work_queue, self), self._work)
        settings = JetStreamHook(self.nats_conn_id).settings()
        inputs, outputs = [], []
        for stream in use.read:
            namespace, name = dataset_names(settings, stream)
            inputs.append(InputDataset(namespace=namespace, name=name))
        for stream, count in use.written:
            namespace, name = dataset_names(settings, stream)
            facets: dict[str, Any] = {}
            if count is not None:
                facets["outputStatistics"] = OutputStatisticsOutputDatasetFacet(rowCount=count)
            outputs.append(OutputDataset(namespace=namespace, name=name, outputFacets=facets))
        return OperatorLineage(inputs=inputs, outputs=outputs)

    def _stream_assets(self) -> Iterator[Asset]:
        """Return the outlets that are streams of the task's queue."""
        outlets = [asset for asset in getattr(self, "outlets", ()) if isinstance(asset, Asset)]
        addresses = [(asset, StreamAddress.of(asset.uri)) for asset in outlets if asset.uri.startswith(f"{SCHEME}://")]
        if not addresses:
            return
        use = self.stream_use(load_queue(self.work_queue, self), self._work or {})
        streams = {*use.read, *(stream for stream, _ in use.written)}
        for asset, address in addresses:
            if address.connection == self.nats_conn_id and address.stream in streams:
                yield asset

    def _event(self, context: Context, work: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: work[name] for name in self.event_fields if work.get(name) is not None}
        # Each range is a list; a run of a million jobs may have as many.
        short = {name: value[:_RANGES] if isinstance(value, list) else value for name, value in values.items()}
        return json_result({"run_id": context.get("run_id"), **short})
