"""Each configuration value of the documents: provisioned from the queue file, and adopted where it was made by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from document_configurations import DOCUMENTS, Document

from airflow_provider_jetstream.jetstream import WorkQueue, plan, provision
from airflow_provider_jetstream.jetstream.contract import DEAD_LETTER_MARK
from testbed.face import consumer_info, stream_info

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.face import NatsPyConnection

# Fields that provisioning may change of a stream or consumer that the document made: copies of jobs and of entries, the
# report of acknowledgements, where the document leaves retries endless their number, and the shorter life of urgent
# tasks.
_ADDED = {"republish", "sample_freq", "max_deliver", "max_age"}


@pytest.fixture(params=list(DOCUMENTS.values()), ids=list(DOCUMENTS))
def document(request: pytest.FixtureRequest) -> Document:
    assert isinstance(request.param, Document)
    return request.param


async def test_the_queue_file_provisions_each_value_of_the_document(
    connection: NatsPyConnection, document: Document
) -> None:
    await provision(connection, WorkQueue.load(document.path))
    found = await configurations(connection, document)
    for name, expected in expected_values(document):
        if name == "TASKS_HIGH":
            assert found[name].pop("max_age") == 3_600_000_000_000
        assert {field: found[name].get(field, expected[field]) for field in expected} == expected, name


@pytest.mark.slow
async def test_what_the_document_made_by_hand_is_adopted_with_its_values(
    connection: NatsPyConnection, document: Document
) -> None:
    await document.create(connection)
    queue = WorkQueue.load(document.path)
    before = await configurations(connection, document)
    await provision(connection, queue)
    after = await configurations(connection, document)
    for name, config in before.items():
        changed = {field for field in config | after[name] if config.get(field) != after[name].get(field)}
        assert changed <= _ADDED, name
    assert (await plan(connection, queue)).changes == ()


def expected_values(document: Document) -> Iterator[tuple[str, dict[str, Any]]]:
    for stream in document.streams:
        yield stream["name"], stream
    for stream_name, consumers in document.consumers.items():
        for consumer in consumers:
            yield f"{stream_name}/{consumer['durable_name']}", consumer


async def configurations(connection: NatsPyConnection, document: Document) -> dict[str, dict[str, Any]]:
    found = {}
    for name, _ in expected_values(document):
        stream, _, consumer = name.partition("/")
        info = await (consumer_info(connection, stream, consumer) if consumer else stream_info(connection, stream))
        config = dict(info["config"])
        # The server adds names of its own, and provisioning the number of partitions.
        marks = {key: value for key, value in (config.pop("metadata", None) or {}).items() if key == DEAD_LETTER_MARK}
        found[name] = config | ({"metadata": marks} if marks else {})
    return found
