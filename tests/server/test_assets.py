"""Assets of streams, the events that tasks fill, and the lineage that they report."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from airflow.providers.openlineage.extractors.base import DefaultExtractor
from airflow.providers.openlineage.utils.utils import translate_airflow_asset
from airflow.sdk import Asset
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_provider_jetstream.assets.stream_asset import (
    StreamAddress,
    convert_asset_to_openlineage,
    create_asset,
    dead_letter_asset,
    queue_asset,
    sanitize_uri,
)
from airflow_provider_jetstream.jetstream import Job, connection_settings
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator
from airflow_provider_jetstream.worker import Delivery, GiveUpError
from testbed.queues import CONSUMER, make_dead_letters, make_queue, publish_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

CONNECTION = "nats_assets"


@pytest.fixture
def namespace(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Declare the connection, with what must not be seen, and return the namespace of its datasets."""
    form = {"conn_type": "nats", "host": nats.url, "extra": {"timeout": 5}}
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONNECTION.upper()}", json.dumps(form))
    return f"nats://127.0.0.1:{nats.port}"


@pytest.mark.parametrize(
    ("uri", "normalised"),
    [
        ("jetstream://nats_default/orders", "jetstream://nats_default/orders"),
        ("jetstream://nats_default/orders/", "jetstream://nats_default/orders"),
        ("jetstream://n/orders/orders.*.new", "jetstream://n/orders/orders.*.new"),
        ("jetstream://n/orders/orders.>", "jetstream://n/orders/orders.%3E"),
        ("jetstream://n/orders/orders.%3e", "jetstream://n/orders/orders.%3E"),
        ("jetstream://n/orders/a/b", "jetstream://n/orders/a%2Fb"),
        ("jetstream://n/or%64ers", "jetstream://n/orders"),
        ("jetstream://n/bestellungen-ü", "jetstream://n/bestellungen-%C3%BC"),
    ],
)
def test_a_uri_has_one_form(uri: str, normalised: str) -> None:
    assert sanitize_uri(urlsplit(uri)).geturl() == normalised
    # Airflow calls the handler that the provider names.
    assert Asset(uri).uri == normalised
    assert StreamAddress.of(normalised).uri == normalised


@pytest.mark.parametrize(
    "uri",
    [
        *("jetstream://n", "jetstream://n/", "jetstream:///orders", "jetstream://n/or.ders", "jetstream://n/or ders"),
        *("jetstream://n/orders?x=1", "jetstream://n/orders/a..b", "jetstream://n/*", "jetstream://u@n/orders"),
        *(
            "jetstream://n/a%2Fb",
            "jetstream://n/a%5Cb",
            "jetstream://n/a%00b",
            "jetstream://n/o/x%0Ay",
            "jetstream://n/%20",
        ),
    ],
)
def test_a_uri_that_names_no_stream_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=r"expected .*jetstream://<connection>/<stream>"):
        Asset(uri)


def test_the_factory_makes_the_uri_of_any_names() -> None:
    asset = create_asset(connection="a/b", stream="x?y", subject="s.#/%", extra={"k": 1})
    assert StreamAddress.of(asset.uri) == ("a/b", "x?y", "s.#/%")
    assert asset.extra == {"k": 1}


async def test_a_stream_is_a_dataset_of_its_server(connection: NatsPyConnection, name: str, namespace: str) -> None:
    queue = await make_queue(connection, name)
    dataset = convert_asset_to_openlineage(queue_asset(queue, nats_conn_id=CONNECTION), None)
    assert (dataset.namespace, dataset.name) == (namespace, name)
    dataset = convert_asset_to_openlineage(queue_asset(queue, nats_conn_id=CONNECTION, subject=f"{name}.>"), None)
    assert dataset.name == f"{name}/{name}.>"
    # Airflow's provider for OpenLineage finds the converter by the provider's metadata.
    translated = translate_airflow_asset(queue_asset(queue, nats_conn_id=CONNECTION), None)
    assert translated is not None
    assert (translated.namespace, translated.name) == (namespace, name)


def test_a_dataset_names_the_domain_and_nobody_who_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"conn_type": "nats", "host": "tls://[::1]", "login": "u", "password": "pw", "extra": {"js_domain": "hub"}}
    monkeypatch.setenv("AIRFLOW_CONN_NATS_HUB", json.dumps(form))
    dataset = convert_asset_to_openlineage(Asset("jetstream://nats_hub/orders"), None)
    assert (dataset.namespace, dataset.name) == ("nats://[::1]:4222", "hub.orders")


def lineage_event(lineage: Any) -> dict[str, Any]:
    """Return the event that OpenLineage's own client makes of a task's lineage, which checks it against the schema."""
    from openlineage.client.event_v2 import Job as LineageJob
    from openlineage.client.event_v2 import Run, RunEvent, RunState
    from openlineage.client.serde import Serde
    from openlineage.client.uuid import generate_new_uuid

    event = RunEvent(
        eventType=RunState.COMPLETE,
        eventTime="2026-01-01T00:00:00Z",
        run=Run(runId=str(generate_new_uuid()), facets=lineage.run_facets),
        job=LineageJob(namespace="n", name="dag.task", facets=lineage.job_facets),
        inputs=lineage.inputs,
        outputs=lineage.outputs,
        producer="https://example.org",
    )
    parsed: dict[str, Any] = json.loads(Serde.to_json(event))
    return parsed


def finished(operator: Any, *outlets: Asset) -> dict[str, Any]:
    """Run an operator as Airflow's task runner does, and return the extras of its outlets' events."""
    events = OutletEventAccessors()
    context = {
        "ti": SimpleNamespace(
            dag_id="d", run_id="r", task_id=operator.task_id, map_index=-1, try_number=1, max_tries=0
        ),
        "dag_run": SimpleNamespace(run_id="r", conf={}),
        "run_id": "r",
        "outlet_events": events,
    }
    operator.execute(context)
    operator.post_execute(context)
    return {asset.uri: events[asset].extra for asset in outlets}


async def test_publishing_and_redriving_say_what_they_did(
    connection: NatsPyConnection, name: str, namespace: str
) -> None:
    queue = await make_queue(connection, name)
    jobs, letters = queue_asset(queue, nats_conn_id=CONNECTION), dead_letter_asset(queue, nats_conn_id=CONNECTION)
    other, foreign = Asset("jetstream://elsewhere/orders"), Asset("file:///x")
    publish = JetStreamPublishOperator(
        task_id="publish",
        work_queue=queue,
        subject=f"{name}.jobs.x",
        jobs=[Job(b"", id="a"), Job(b"", id="b")],
        nats_conn_id=CONNECTION,
        outlets=[jobs, other, foreign],
    )
    extras = await asyncio.to_thread(finished, publish, jobs, other, foreign)
    assert extras[jobs.uri] == {
        "run_id": "r", "published": 2, "duplicates": 0, "scheduled": 0, "sequences": [[1, 2]]
    }  # fmt: skip
    assert (extras[other.uri], extras[foreign.uri]) == ({}, {})
    # As Airflow's provider for OpenLineage calls it.
    event = lineage_event(await asyncio.to_thread(DefaultExtractor(publish).extract_on_complete, None))
    (output,) = event["outputs"]
    assert (output["namespace"], output["name"]) == (namespace, name)
    facet = output["outputFacets"]["outputStatistics"]
    assert facet["rowCount"] == 2
    assert facet["_schemaURL"].startswith("https://openlineage.io/spec/facets/")

    await connection.client.jetstream().purge_stream(name)
    await make_dead_letters(connection, queue, ["a", "b", "c"])
    redrive = JetStreamRedriveOperator(
        task_id="redrive", work_queue=queue, nats_conn_id=CONNECTION, outlets=[jobs], inlets=[letters]
    )
    extras = await asyncio.to_thread(finished, redrive, jobs)
    assert (extras[jobs.uri]["redriven"], extras[jobs.uri]["from_sequences"]) == (3, [[3, 5]])
    event = lineage_event(await asyncio.to_thread(redrive.get_openlineage_facets_on_complete, None))
    assert [dataset["name"] for dataset in event["inputs"]] == [f"{name}-dead"]
    assert event["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 3


@pytest.mark.slow
async def test_consuming_says_how_many_messages_had_which_outcome(
    connection: NatsPyConnection, name: str, namespace: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3})
    jobs, letters = queue_asset(queue, nats_conn_id=CONNECTION), dead_letter_asset(queue, nats_conn_id=CONNECTION)
    await publish_jobs(connection, queue, ["done", "bad", "done"])

    def handle(job: Delivery) -> str:
        if job.body == b"bad":
            raise GiveUpError("no such order")
        return "secret of a message"

    consume = JetStreamConsumeOperator(
        task_id="consume",
        work_queue=queue,
        consumer=CONSUMER,
        handler=handle,
        nats_conn_id=CONNECTION,
        outlets=[jobs, letters],
    )
    extras = await asyncio.to_thread(finished, consume, jobs, letters)
    assert extras[jobs.uri] == {
        "run_id": "r", "consumer": CONSUMER, "deliveries": 3, "counts": {"completed": 2, "given_up": 1}
    }  # fmt: skip
    # The task reads the queue; what becomes a dead letter isn't its product.
    assert extras[letters.uri] == {}
    event = lineage_event(await asyncio.to_thread(DefaultExtractor(consume).extract_on_complete, None))
    assert [(dataset["namespace"], dataset["name"]) for dataset in event["inputs"]] == [(namespace, name)]
    assert event["outputs"] == []
    assert "secret" not in json.dumps([event, extras])


async def test_what_an_author_says_of_an_event_stays(connection: NatsPyConnection, name: str, namespace: str) -> None:
    queue = await make_queue(connection, name)
    asset = queue_asset(queue, nats_conn_id=CONNECTION)
    operator = JetStreamPublishOperator(
        task_id="t", work_queue=queue, subject=f"{name}.jobs.x", jobs=[], nats_conn_id=CONNECTION, outlets=[asset]
    )
    events = OutletEventAccessors()
    events[asset].extra = {"published": "mine"}
    operator.note_work({"published": 7, "sequences": [[number, number] for number in range(1_000)]})
    operator.post_execute({"outlet_events": events, "run_id": "r"})
    assert events[asset].extra["published"] == "mine"
    assert events[asset].extra["sequences"] == [[number, number] for number in range(100)]


async def test_a_report_reads_jobs_and_letters(
    connection: NatsPyConnection, name: str, namespace: str, tmp_path: Any
) -> None:
    queue: WorkQueue = await make_queue(connection, name)
    operator = JetStreamDeadLetterReportOperator(
        task_id="t", work_queue=queue, directory=str(tmp_path), nats_conn_id=CONNECTION
    )
    assert operator.get_openlineage_facets_on_complete(None).inputs == []
    operator.note_work({"letters": 3})
    event = lineage_event(operator.get_openlineage_facets_on_complete(None))
    assert [dataset["name"] for dataset in event["inputs"]] == [name, f"{name}-dead"]
    assert {dataset["namespace"] for dataset in event["inputs"]} == {namespace}


@pytest.mark.slow
def test_a_dag_file_loads_nothing_of_openlineage() -> None:
    code = (
        "import sys, airflow_provider_jetstream.operators.redrive, airflow_provider_jetstream.assets.stream_asset\n"
        "print([name for name in sys.modules if name.startswith(('openlineage', 'airflow.providers.openlineage.e'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_settings_without_a_domain_name_the_stream_alone() -> None:
    from airflow_provider_jetstream.assets.stream_asset import dataset_names

    settings = connection_settings({"servers": ("nats://b:5000", "nats://a:4000")})
    assert dataset_names(settings, "orders") == ("nats://b:5000", "orders")
