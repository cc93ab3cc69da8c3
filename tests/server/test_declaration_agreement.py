"""The checks of declarations agree with the server: neither refuses what the other accepts."""

from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import WorkQueue, connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import ApiError, QueueDeclarationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream import Connection
    from testbed.nats_server import NatsServer

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


@pytest.mark.parametrize("subject", ["q.>", "requeued.>", "requeued.q.1", "requeued.*.x", "requeued.q", "requeued.q.>"])
async def test_a_subject_beside_the_markers_is_valid_if_and_only_if_the_server_accepts_it(
    own: Connection, subject: str
) -> None:
    subjects = [subject, "requeued.q.*"]
    declared = _declared(name="q", subjects=[subject], atomic_redrive=True)
    assert declared == await _accepts_stream(own, name="q", subjects=subjects, allow_atomic=True, allow_msg_ttl=True)


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
