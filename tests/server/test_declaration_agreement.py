"""The checks of declarations agree with the server: neither refuses what the other accepts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Plan, WorkQueue, apply, connect, connection_settings, plan, provision
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    DriftError,
    ProvisioningError,
    QueueDeclarationError,
    TransientError,
)
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from airflow_provider_jetstream.jetstream import Connection
    from testbed.face import NatsPyConnection

_TOKENS = ("a", "b", "*")
_FILTERS = [
    ".".join(("x", *tokens, last))
    for length in range(2)
    for tokens in product(_TOKENS, repeat=length)
    for last in (*_TOKENS, ">")
]
_PAIRS = 120


@pytest.fixture
async def own(own_nats: NatsServer) -> AsyncIterator[Connection]:
    """A connection to a server without other streams."""
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as opened:
        yield opened


def _declared(**values: Any) -> bool:
    try:
        WorkQueue(**values)
    except QueueDeclarationError:
        return False
    return True


async def _accepts(connection: Connection, subject: str, body: dict[str, Any]) -> bool:
    try:
        await connection.api(subject, body)
    except ApiError:
        return False
    return True


async def _accepts_stream(connection: Connection, **config: Any) -> bool:
    taken = await _accepts(connection, f"STREAM.CREATE.{config['name']}", {"retention": "workqueue", **config})
    if taken:
        await connection.api(f"STREAM.DELETE.{config['name']}")
    return taken


@pytest.mark.parametrize(
    "subjects",
    [
        [">"],
        ["*"],
        ["*.*"],
        ["*.>"],
        ["$JS.>"],
        ["$JS.API.>"],
        ["$JS.ACK.>"],
        ["$JS.EVENT.>"],
        ["$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.q.*"],
        ["$SYS.>"],
        ["$SYS.ACCOUNT.A.CONNECT"],
        ["$KV.q.>"],
        ["a..b"],
        ["a.", "b"],
        ["a b"],
        ["a.>.b"],
        ["a.>", "a.b"],
        ["a.*", "b.*"],
        ["a*.b"],
    ],
    ids=" ".join,
)
async def test_subjects_are_valid_if_and_only_if_the_server_accepts_them(own: Connection, subjects: list[str]) -> None:
    assert _declared(name="q", subjects=subjects) == await _accepts_stream(own, name="q", subjects=subjects)


@pytest.mark.parametrize(
    "subject",
    [
        "q.>",
        "archive.>",
        "archive.q",
        "archive.*",
        "archive.q.x",
        "archive.*.x",
        "archive.other.>",
        "*.q.>",
        "requeued.>",
    ],
)
async def test_a_subject_beside_an_archive_is_valid_if_and_only_if_the_server_accepts_it(
    own: Connection, subject: str
) -> None:
    archived = {"subjects": [subject], "republish": {"src": ">", "dest": "archive.q.>"}}
    alone = await _accepts_stream(own, name="q", **archived)
    await own.api("STREAM.CREATE.q-archive", {"name": "q-archive", "subjects": ["archive.q.>"]})
    beside = await _accepts_stream(own, name="q", **archived)
    await own.api("STREAM.DELETE.q-archive")
    assert _declared(name="q", subjects=[subject], archive=True) == beside
    # The server refuses it as a cycle even where no stream captures the copies.
    assert alone or not beside


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q", "q-1_x", "grün", "$q", "q.1", "q*", "q>", "q/1", "q\\1", "n" * 255, "n" * 256])
async def test_a_name_is_valid_only_if_the_server_accepts_it(own: Connection, name: str) -> None:
    good = _declared(name=name, subjects=["s.>"])
    own.timeout = 0.5
    try:
        taken = await _accepts_stream(own, name=name, subjects=["s.>"])
    except TimeoutError:
        # The server's answer to an API subject with too many tokens.
        taken = False
    assert good == taken


_NANOSECONDS = {
    "99ms": 99 * 10**6,
    "100ms": 10**8,
    "200ms": 2 * 10**8,
    "1h": 3600 * 10**9,
    "2h": 7200 * 10**9,
    -1: 0,
}


@pytest.mark.parametrize(
    ("window", "age"), [("100ms", "100ms"), ("1h", "1h"), ("2h", "1h"), ("99ms", -1), ("1h", -1), ("200ms", "99ms")]
)
async def test_windows_and_ages_are_valid_if_and_only_if_the_server_accepts_them(
    own: Connection, window: str, age: str | int
) -> None:
    config = {"duplicate_window": _NANOSECONDS[window], "max_age": _NANOSECONDS[age]}
    declared = _declared(name="q", subjects=["s.>"], duplicate_window=window, max_age=age)
    assert declared == await _accepts_stream(own, name="q", subjects=["s.>"], **config)


@pytest.mark.slow
async def test_two_filters_are_valid_if_and_only_if_the_server_accepts_both(own: Connection) -> None:
    stream = {"name": "q", "subjects": ["x.>"], "retention": "workqueue"}
    await own.api("STREAM.CREATE.q", stream)
    pairs = random.Random(1).sample(list(product(_FILTERS, repeat=2)), _PAIRS)  # noqa: S311
    answers = []
    for left, right in pairs:
        consumers = [{"name": "l", "filter_subject": left, "max_deliver": 2}]
        consumers.append({"name": "r", "filter_subject": right, "max_deliver": 2})
        queue = {"name": "q", "subjects": ["x.>"], "consumers": consumers}
        taken = []
        for name, subject in (("l", left), ("r", right)):
            config = {"durable_name": name, "filter_subject": subject, "ack_policy": "explicit", "max_deliver": 2}
            body = {"stream_name": "q", "config": config, "action": "create"}
            taken.append(await _accepts(own, f"CONSUMER.CREATE.q.{name}.{subject}", body))
        answers.append((left, right, _declared(**queue), all(taken)))
        for name, there in zip("lr", taken, strict=True):
            if there:
                await own.api(f"CONSUMER.DELETE.q.{name}")
    assert [answer for answer in answers if answer[2] != answer[3]] == []
    assert 10 < sum(good for _, _, good, _ in answers) < _PAIRS - 10


# A plan is blocked where what exists is in the way. What the server's own limits refuse is found when it is applied.


@dataclass(frozen=True)
class Case:
    """What is on a server, what is declared for it, and how the server answers; ``None`` where it accepts."""

    error: int | None
    declared: Mapping[str, Any] = field(default_factory=dict)
    stream: Mapping[str, Any] | None = None
    others: tuple[Mapping[str, Any], ...] = ()
    consumers: tuple[Mapping[str, Any], ...] = ()


def _consumer(name: str = "w", **fields: Any) -> dict[str, Any]:
    return {"name": name, "filter_subject": "q.a", "max_deliver": 3} | fields


_ONE_STREAM = Case(10065, stream={"subjects": ["q.a"]}, others=({"name": "other", "subjects": ["q.b.>"]},))
CASES = {
    "nothing exists": Case(None),
    "a subject of another stream": replace(_ONE_STREAM, stream=None),
    "a subject of another stream, updating": _ONE_STREAM,
    "a subject that the queue has had before": Case(None, stream={"subjects": ["q.>"]}),
    "a companion's subject": Case(10065, {"events": "e"}, others=({"name": "other", "subjects": ["completed.q.>"]},)),
    "rollups of another tool": Case(None, stream={"allow_rollup_hdrs": True}),
    "a filter that an undeclared consumer has": Case(10100, stream={}, consumers=(_consumer("x"),)),
    "a filter that overlaps with an undeclared one": Case(
        10100, stream={}, consumers=(_consumer("x", filter_subject="q.*"),)
    ),
    "a filter beside an undeclared consumer without": Case(
        10100, stream={}, consumers=(_consumer("x", filter_subject=None),)
    ),
    "no filter beside an undeclared consumer": Case(
        10099, {"consumers": [{"name": "w", "max_deliver": 3}]}, stream={}, consumers=(_consumer("x"),)
    ),
    "a filter beside an undeclared one": Case(None, stream={}, consumers=(_consumer("x", filter_subject="q.b"),)),
    "filters that cross": Case(
        10100,
        {"consumers": [_consumer(filter_subject="q.*.a")]},
        stream={},
        consumers=(_consumer("x", filter_subject="q.b.*"),),
    ),
    "an update to a filter that another has": Case(
        10100, stream={}, consumers=(_consumer("x"), _consumer(filter_subject="q.b"))
    ),
    "consumers that exchange their filters": Case(
        10100,
        {"consumers": [_consumer("x", filter_subject="q.b"), _consumer("w")]},
        stream={},
        consumers=(_consumer("x"), _consumer(filter_subject="q.b")),
    ),
    "consumers that pass a filter on": Case(
        None,
        {"consumers": [_consumer("w", filter_subject="q.b"), _consumer("x", filter_subject="q.c")]},
        stream={},
        consumers=(_consumer("x", filter_subject="q.b"), _consumer("w")),
    ),
    "a new consumer for what another gives up": Case(
        None,
        {"consumers": [_consumer("x", filter_subject="q.b"), _consumer("w")]},
        stream={},
        consumers=(_consumer(filter_subject="q.*"),),
    ),
    "a second consumer of a dead letter queue": Case(
        10099,
        {
            "dead_letters": {"name": "d", "retention": "workqueue", "consumers": [{"name": "mine", "max_deliver": 2}]},
            "archive": False,
            "audit": False,
        },
        others=({"name": "d", "subjects": ["$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.q.*"]},),
        consumers=({"stream": "d", "name": "theirs", "max_deliver": 2},),
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
async def alone(server: NatsServer) -> AsyncIterator[NatsPyConnection]:
    """A connection to a server that stores no stream."""
    async with connect(connection_settings({"servers": (server.url,), "timeout": 5})) as connection:
        yield connection
        await _remove_all(connection)


async def _remove_all(connection: NatsPyConnection) -> None:
    for stream in (await connection.api("STREAM.NAMES"))["streams"] or []:
        await connection.api(f"STREAM.DELETE.{stream}")


def _queue(case: Case) -> WorkQueue:
    return WorkQueue(**{"name": "q", "subjects": ["q.>"], "consumers": [_consumer()], **case.declared})


async def _make(connection: NatsPyConnection, case: Case) -> None:
    """Create by hand what exists."""
    if case.stream is not None:
        await _make_stream(connection, {"name": "q", "subjects": ["q.>"], **case.stream})
    for stream in case.others:
        await _make_stream(connection, {"subjects": [f"{stream['name']}.>"], **stream})
    for consumer in case.consumers:
        config = {key: value for key, value in consumer.items() if value is not None and key != "stream"}
        config |= {"durable_name": consumer["name"], "ack_policy": "explicit", "deliver_policy": "all"}
        stream = consumer.get("stream", "q")
        body = {"stream_name": stream, "config": config}
        await connection.api(f"CONSUMER.DURABLE.CREATE.{stream}.{consumer['name']}", body)


async def _make_stream(connection: NatsPyConnection, fields: Mapping[str, Any]) -> None:
    config = {"retention": "workqueue", "storage": "file", "num_replicas": 1, **fields}
    await connection.api(f"STREAM.CREATE.{config['name']}", config)


async def _everything(connection: NatsPyConnection) -> list[Any]:
    streams = (await connection.api("STREAM.LIST"))["streams"] or []
    consumers = [
        (await connection.api(f"CONSUMER.LIST.{stream['config']['name']}"))["consumers"] or [] for stream in streams
    ]
    return [[item["config"] for item in items] for items in (streams, *consumers)]


async def _check(connection: NatsPyConnection, case: Case) -> None:
    """Compare what a plan says with what the server answers when its steps are taken all the same."""
    await _make(connection, case)
    planned = await plan(connection, _queue(case))
    if case.error is None:
        assert planned.blocked == ()
        await apply(connection, planned)
        assert (await plan(connection, _queue(case))).changes == ()
        return
    before = await _everything(connection)
    with pytest.raises(DriftError, match=rf"\(error {case.error}\)"):
        await provision(connection, _queue(case))
    assert await _everything(connection) == before
    unchecked = Plan(tuple(replace(step, blocked=()) for step in planned.steps))
    # Where a consumer is in the way, another process may have created it after the plan was made.
    with pytest.raises((ProvisioningError, TransientError), match=rf"\(error {case.error}\)"):
        await apply(connection, unchecked)


@pytest.mark.parametrize("case", CASES)
async def test_a_plan_and_the_server_agree(alone: NatsPyConnection, case: str) -> None:
    await _check(alone, CASES[case])
