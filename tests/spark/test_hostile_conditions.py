"""Reads and writes beside a server in lame duck mode, with another limit, or that gives up slow connections.

No JVM: readers and writers are called as Spark's tasks call them, and what fails with an error that Spark retries is
tried again. In the end the rows are those that another client, nats-py, has stored or reads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import nats
import pyarrow as pa
import pytest
from nats.js.api import AckPolicy, ConsumerConfig
from spark_streams import METHODS, make_stream, publish

from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.spark.errors import RowsNotStoredError
from testbed.nats_cluster import NatsCluster
from testbed.nats_server import NatsServer
from testbed.spark_face import RowWriter, open_stream, read_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_COUNT = 100_000
# As often as Spark tries a task.
_TRIES = 4
_WITHIN = 60
_FEW = 500
# The shortest times that the server accepts.
_LAME_DUCK = 'lame_duck_grace_period: "1s"\nlame_duck_duration: "30s"'
_SCHEMA = pa.schema([("value", pa.binary()), ("subject", pa.string())])

Rows = list[tuple[int, bytes]]


def _body(number: int) -> bytes:
    # Of all sizes, so that messages are cut at other places of each buffer.
    return b"%d %b" % (number, b"x" * (number * 37 % 400))


def _bodies(count: int = _COUNT) -> list[bytes]:
    return [_body(number) for number in range(count)]


def _fill(options: Mapping[str, str], **config: Any) -> None:
    with open_stream({**options, "servers": options["servers"].split(",")[0]}) as stream:
        make_stream(stream, **config)
        for start in range(0, _COUNT, 20_000):
            part = range(start, start + 20_000)
            publish(stream, ((f"{stream.name}.{number % 7}", None, _body(number)) for number in part))


def _stored(options: Mapping[str, str]) -> Rows:
    """Read everything with nats-py."""
    return asyncio.run(_read_with_client(options))


async def _read_with_client(options: Mapping[str, str]) -> Rows:
    client = await nats.connect(options["servers"].split(","), connect_timeout=10)
    try:
        jetstream = client.jetstream(timeout=10)
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True)
        consumer = await jetstream.pull_subscribe("", stream=options["stream"], config=config)
        count = (await jetstream.stream_info(options["stream"])).state.messages
        rows: Rows = []
        while len(rows) < count:
            rows += [(found.metadata.sequence.stream, found.data) for found in await consumer.fetch(200, timeout=10)]
        return rows
    finally:
        await client.close()


def _read(options: Mapping[str, str], step: Callable[[int], None]) -> Rows:
    """Read everything, as a task that Spark tries again after an error that passes.

    :param step: is called after each batch with the number of rows, as what processes them
    """
    with open_stream(options) as stream:
        last = stream.info().last
    for attempt in range(_TRIES):
        rows: Rows = []
        try:
            for batch in read_batches(options, ("seq", "value"), 1, last):
                rows += zip(batch.column("seq").to_pylist(), batch.column("value").to_pylist(), strict=True)
                step(len(rows))
        except TransientError:
            if attempt == _TRIES - 1:
                raise
        else:
            return rows
    raise AssertionError


def _write(
    options: Mapping[str, str], bodies: list[bytes], step: Callable[[int], None], tries: int = _TRIES
) -> RowWriter:
    """Write rows, as a task that Spark tries again after an error.

    :param step: is called after each slice of rows with their number, as what makes them
    """
    options = {**options, "subject": f"{options['stream']}.a"}
    for attempt in range(tries):
        try:
            with RowWriter(options) as writer:
                _write_all(writer, bodies, step)
                return writer
        except RowsNotStoredError:
            if attempt == tries - 1:
                raise
    raise AssertionError


def _write_all(writer: RowWriter, bodies: list[bytes], step: Callable[[int], None]) -> None:
    for start in range(0, len(bodies), _FEW):
        part = [{"value": body} for body in bodies[start : start + _FEW]]
        writer.send(pa.RecordBatch.from_pylist(part, _SCHEMA))
        step(start + len(part))
    writer.wait_for_all()


def _once(at: int, act: Callable[[], object]) -> Callable[[int], None]:
    """Return a step that does something once, when there are so many rows."""
    done: list[int] = []

    def step(rows: int) -> None:
        if rows >= at and not done:
            done.append(rows)
            act()

    return step


def _each(*steps: Callable[[int], None]) -> Callable[[int], None]:
    def step(rows: int) -> None:
        for each in steps:
            each(rows)

    return step


def _wait(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + _WITHIN
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _begin_lame_duck(server: NatsServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGUSR2)
    _wait(lambda: "] JetStream Shutdown" in server.log())


def _start_when_ended(server: NatsServer) -> threading.Thread:
    def start() -> None:
        _wait(lambda: not server.alive)
        server.start()

    thread = threading.Thread(target=start)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_read_continues_where_the_server_is_restarted_by_lame_duck_mode(name: str, method: str) -> None:
    with NatsServer(config=_LAME_DUCK) as server:
        options = {"servers": server.url, "stream": name, "fetchMethod": method}
        _fill(options)
        starting = _start_when_ended(server)
        rows = _read(options, _once(20_000, lambda: _begin_lame_duck(server)))
        starting.join()
        assert rows == _stored(options) == list(enumerate(_bodies(), 1))


@pytest.mark.slow
def test_a_read_and_a_write_go_on_with_another_server_of_a_cluster(name: str) -> None:
    with NatsCluster() as cluster:
        for server in cluster.servers.values():
            server.config += f"\n{_LAME_DUCK}"
            server.reload()
        options = {"servers": ",".join(cluster.urls), "stream": name}
        with open_stream(options) as stream:
            make_stream(stream, num_replicas=3)
        leaders = []

        def begin() -> None:
            leaders.append(cluster.leader(name))
            _begin_lame_duck(cluster.server(leaders[-1]))

        _write(options, _bodies(), _once(20_000, begin))
        _wait(lambda: len(cluster.alive) == 2)
        cluster.restart(leaders[0])
        cluster.wait_settled(name)
        assert sorted(body for _, body in _stored(options)) == sorted(_bodies())
        rows = _read(options, _once(20_000, begin))
        assert rows == _stored(options)


def _limit(server: NatsServer, limit: str) -> None:
    _reload(server, f"max_payload: {limit}")


def _reload(server: NatsServer, config: str) -> None:
    reloads = server.log().count("Reloaded server configuration")
    server.config = config
    server.reload()
    _wait(lambda: server.log().count("Reloaded server configuration") > reloads)


@pytest.mark.slow
def test_rows_above_a_lowered_limit_are_named_and_stored_by_a_later_try(name: str) -> None:
    with NatsServer(config="max_payload: 1MB") as server:
        options = {"servers": server.url, "stream": name, "timeout": "3"}
        with open_stream(options) as stream:
            make_stream(stream)
        bodies = _bodies(3_000)
        bodies[2_000] = b"z" * 100_000
        with pytest.raises(RowsNotStoredError) as caught:
            _write(options, bodies, _once(_FEW, lambda: _limit(server, "16KB")), tries=1)
        assert "rows 2000: body and headers have more than the 16384 bytes that the server takes" in str(caught.value)
        assert str(caught.value).startswith("1 rows of partition 0")
        _limit(server, "1MB")
        publisher = _write(options, bodies, _each(), tries=1)
        assert (publisher.stored, publisher.duplicates) == (3_000, 2_999)
        assert sorted(body for _, body in _stored(options)) == sorted(bodies)


@pytest.mark.slow
def test_a_reader_that_the_server_gives_up_for_being_slow_misses_no_row(name: str) -> None:
    config = 'max_payload: 64KB\nmax_pending: 256KB\nwrite_deadline: "200ms"'
    with NatsServer(config=config) as server:
        options = {"servers": server.url, "stream": name, "fetchMethod": "consumer"}
        _fill(options)
        rows = _read(options, _once(1, lambda: _wait(lambda: server.monitor("varz")["slow_consumers"])))
        assert rows == _stored(options) == list(enumerate(_bodies(), 1))


_PINGS = 'ping_interval: "100ms"\nping_max: 2'


def _pauses(server: NatsServer) -> Callable[[int], None]:
    """Return a step that lasts, twice, until the server has given up all connections, which answer no pings."""

    def pause() -> None:
        _wait(lambda: not server.monitor("connz")["connections"])

    return _each(_once(1, pause), _once(90_000, pause))


def _stored_without_pings(server: NatsServer, options: Mapping[str, str]) -> Rows:
    """Read everything with nats-py, which answers pings late; the server has given up a connection before."""
    closed = server.monitor("connz?state=closed&limit=10000")["connections"]
    assert "Stale Connection" in {connection["reason"] for connection in closed}
    _reload(server, "")
    return _stored(options)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_task_that_is_too_slow_for_the_servers_pings_misses_no_row(name: str, method: str) -> None:
    with NatsServer(config=_PINGS) as server:
        options = {"servers": server.url, "stream": name, "fetchMethod": method}
        _fill(options)
        rows = _read(options, _pauses(server))
        assert rows == _stored_without_pings(server, options) == list(enumerate(_bodies(), 1))
