"""Assets of streams, ``jetstream://<connection>/<stream>[/<subject>]``, and what a task tells of those it used.

The connection is the id of an Airflow connection, which says nothing of servers and credentials. Characters that mean
something in an address are written as ``%2F`` and the like, since a subject may contain them.

An operator declares no asset by itself. Airflow fails a task with an asset that isn't active, such as where two DAGs
give one URI two names, and each asset makes an event with each run. Lineage needs no declaration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Unpack
from urllib.parse import SplitResult, quote, unquote, urlsplit

from airflow.sdk import Asset

from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import DEFAULT_CONN_ID
from airflow_provider_jetstream.tasks.context import json_result
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.queue_source import load_queue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from airflow.providers.common.compat.openlineage.facet import Dataset
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource, WorkQueue
    from airflow_provider_jetstream.tasks.argument_types import AssetOptions

SCHEME = "jetstream"
_FORM = "jetstream://<connection>/<stream>[/<subject>]"


class StreamAddress(NamedTuple):
    """What an asset's URI names."""

    connection: str
    stream: str
    subject: str | None

    @classmethod
    def of(cls, uri: str | SplitResult) -> StreamAddress:
        """Read a URI.

        :raises ValueError: it names no stream
        """
        parts = urlsplit(uri) if isinstance(uri, str) else uri
        path = parts.path.removeprefix("/")
        stream, _, subject = (unquote(part) for part in path.partition("/"))
        address = cls(unquote(parts.netloc), stream, subject or None)
        if parts.scheme != SCHEME or not address.connection or parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError(f"expected {_FORM}, found {parts.geturl()!r}")
        forbidden = "it has a dot or a slash" if set(stream) & set("./\\") else None
        if problem := subject_problem(stream, wildcards=False) or forbidden:
            raise ValueError(f"expected the name of a stream in {_FORM}, found {stream!r}: {problem}")
        if subject and (problem := subject_problem(subject)):
            raise ValueError(f"expected a subject in {_FORM}, found {subject!r}: {problem}")
        return address

    @property
    def uri(self) -> str:
        """The address as a URI, the same for all ways to write it."""
        names = [self.stream, *([self.subject] if self.subject else [])]
        return f"{SCHEME}://{quote(self.connection, safe='')}/{'/'.join(quote(name, safe='*') for name in names)}"


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """Check and normalise the URI of an asset; called by Airflow.

    :param uri: the URI in its parts, ``jetstream://<connection>/<stream>[/<subject>]``
    :raises ValueError: it names no stream
    """
    return urlsplit(StreamAddress.of(uri).uri)


def create_asset(
    *, connection: str, stream: str, subject: str | None = None, extra: dict[str, Any] | None = None
) -> Asset:
    """Return the asset of a stream; called by Airflow for what hooks report.

    :param connection: the id of the Airflow connection
    :param stream: the stream's name
    :param subject: a subject of the stream, for an asset of its messages alone
    :param extra: further values of the asset
    """
    return Asset(uri=StreamAddress(connection, stream, subject).uri, extra=extra)


def queue_asset(
    work_queue: QueueSource,
    *,
    nats_conn_id: str = DEFAULT_CONN_ID,
    subject: str | None = None,
    name: str | None = None,
    **arguments: Unpack[AssetOptions],
) -> Asset:
    """Return the asset of a work queue's jobs.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param nats_conn_id: the Airflow connection
    :param subject: a subject of the queue, for an asset of its jobs alone
    :param name: of the asset; the URI where absent. Airflow accepts one name for a URI
    :param arguments: further arguments of the asset, such as ``watchers``
    """
    return _asset(load_queue(work_queue).name, nats_conn_id, subject, name, arguments)


def dead_letter_asset(
    work_queue: QueueSource,
    *,
    nats_conn_id: str = DEFAULT_CONN_ID,
    name: str | None = None,
    **arguments: Unpack[AssetOptions],
) -> Asset:
    """Return the asset of a work queue's dead letters.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param nats_conn_id: the Airflow connection
    :param name: of the asset; the URI where absent. Airflow accepts one name for a URI
    :param arguments: further arguments of the asset, such as ``watchers``
    :raises QueueDeclarationError: the queue declares no dead letter queue
    """
    return _asset(runtime.require_dead_letters(load_queue(work_queue)).name, nats_conn_id, None, name, arguments)


def convert_asset_to_openlineage(asset: Asset, lineage_context: Any) -> Dataset:
    """Return the OpenLineage dataset of an asset; called by Airflow's provider for OpenLineage.

    :param asset: the asset of a stream
    :param lineage_context: what Airflow passes; not used
    """
    address = StreamAddress.of(asset.uri)
    return stream_dataset(hook_for(address.connection).settings(), address.stream, address.subject)


def stream_dataset(settings: ConnectionSettings, stream: str, subject: str | None = None) -> Dataset:
    """Return the OpenLineage dataset of a stream: its namespace says the first server, never who connects to it."""
    from airflow.providers.common.compat.openlineage.facet import Dataset

    namespace, name = dataset_names(settings, stream, subject)
    return Dataset(namespace=namespace, name=name)


def dataset_names(settings: ConnectionSettings, stream: str, subject: str | None = None) -> tuple[str, str]:
    """Return namespace and name of a stream's dataset."""
    server = urlsplit(settings.servers[0])
    host = f"[{server.hostname}]" if ":" in str(server.hostname) else server.hostname
    # A server knows a stream of each domain by the same name, and no name of a stream has a dot.
    name = f"{settings.js_domain}.{stream}" if settings.js_domain else stream
    return f"nats://{host}:{server.port}", f"{name}/{subject}" if subject else name


def _asset(stream: str, connection: str, subject: str | None, name: str | None, arguments: AssetOptions) -> Asset:
    uri = StreamAddress(connection, stream, subject).uri
    return Asset(name=name or uri, uri=uri, **arguments)


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
        settings = hook_for(self.nats_conn_id).settings()
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
