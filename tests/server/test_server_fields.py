"""The table of the fields of streams and consumers has every field that real servers report, and judges by examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.queue.field_rules import RULES
from airflow_provider_jetstream.jetstream.queue.finding import Refusal
from airflow_provider_jetstream.jetstream.queue.server_fields import (
    CONSUMER_FIELDS,
    STREAM_FIELDS,
    config_fields,
    field_findings,
    unknown_fields,
)
from testbed.nats_binaries import NoSuchServerError, nats_server_of
from testbed.nats_cluster import NatsCluster
from testbed.nats_server import NatsServer, find_nats_server

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import Connection
    from airflow_provider_jetstream.jetstream.queue.field_rules import Kind

SECOND = 10**9
NEWEST = "newest"
KINDS: tuple[Kind, ...] = ("queue", "consumer")
LEVELS = {"2.10.27": 0, "2.12.8": 3, NEWEST: 5, "2.15.1": 5}


def binary_of(version: str) -> Path:
    if version == NEWEST:
        return find_nats_server()
    try:
        return nats_server_of(version)
    except NoSuchServerError as error:
        pytest.skip(str(error))


def streams(level: int) -> list[dict[str, Any]]:
    """Return configurations with every field that a server of a level takes, in as few streams as possible."""
    source: dict[str, Any] = {"opt_start_seq": 1, "external": {"api": "$JS.hub.API", "deliver": "hub"}}
    rich: dict[str, Any] = {
        "name": "q",
        "description": "jobs",
        "subjects": ["q.jobs.>"],
        "retention": "workqueue",
        "max_consumers": 9,
        "max_msgs": 1_000,
        "max_bytes": 10_000_000,
        "max_age": 1_000 * SECOND,
        "max_msgs_per_subject": 5,
        "max_msg_size": 1_000,
        "discard": "new",
        "discard_new_per_subject": True,
        "duplicate_window": SECOND,
        "compression": "s2",
        "first_seq": 7,
        "subject_transform": {"src": "q.jobs.>", "dest": "q.work.>"},
        "republish": {"src": ">", "dest": "jobs.q.>", "headers_only": True},
        "allow_direct": True,
        "deny_delete": True,
        "consumer_limits": {"inactive_threshold": 1_000 * SECOND, "max_ack_pending": 500},
        "metadata": {"team": "print"},
        "placement": {"tags": []},
        "sources": [
            {"name": "up", "subject_transforms": [{"src": "up.>", "dest": "q.up.>"}], **source},
            {"name": "down", "filter_subject": "down.x", "opt_start_time": "2026-01-01T00:00:00Z"},
        ],
    }
    mirror: dict[str, Any] = {"name": "m", "retention": "workqueue", "mirror": {"name": "up"}, "mirror_direct": True}
    plain: dict[str, Any] = {"name": "s", "subjects": ["s.>"], "retention": "workqueue", "no_ack": True}
    counters: dict[str, Any] = {"name": "c", "subjects": ["c.>"]}
    if level >= 1:
        rich |= {"allow_msg_ttl": True, "subject_delete_marker_ttl": SECOND}
    if level >= 2:
        rich |= {"allow_atomic": True}
        plain |= {"allow_msg_schedules": True, "persist_mode": "async"}
        counters |= {"allow_msg_counter": True}
    if level >= 4:
        rich |= {"allow_batched": True}
    return [{"name": "up", "subjects": ["up.>"]}, rich, mirror, plain, counters]


def consumers(level: int) -> dict[str, dict[str, Any]]:
    pull = {
        "description": "workers",
        "ack_policy": "explicit",
        "ack_wait": SECOND,
        "max_deliver": 5,
        "backoff": [SECOND, 2 * SECOND],
        "filter_subjects": ["q.work.a", "q.up.b"],
        "sample_freq": "100%",
        "max_waiting": 10,
        "max_ack_pending": 10,
        "headers_only": True,
        "max_batch": 5,
        "max_expires": 10 * SECOND,
        "max_bytes": 10_000,
        "inactive_threshold": 100 * SECOND,
        "num_replicas": 1,
        "mem_storage": True,
        "metadata": {"team": "print"},
    }
    push = {
        "ack_policy": "explicit",
        "filter_subject": "q.work.p",
        "deliver_subject": "d.p",
        "deliver_group": "g",
        "idle_heartbeat": SECOND,
        "flow_control": True,
        "rate_limit_bps": 10_000,
        "max_ack_pending": 10,
        "replay_policy": "original",
    }
    if level >= 1:
        groups = {"priority_groups": ["a"], "priority_policy": "pinned_client", "priority_timeout": 10 * SECOND}
        pull |= groups | {"pause_until": "2099-01-01T00:00:00Z"}
    return {"w": pull, "p": push}


async def read_everything(connection: Connection, level: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Create the streams and consumers, and return what the server says of each with the table for it."""
    answers = []
    details = {"subjects_filter": ">", "deleted_details": True}
    for config in streams(level):
        await connection.api(f"STREAM.CREATE.{config['name']}", config)
        if config["name"] == "up":
            for _ in range(3):
                await connection.publish_acknowledged("up.a", b"")
            await connection.api("STREAM.MSG.DELETE.up", {"seq": 2})
        answers.append((STREAM_FIELDS, await connection.api(f"STREAM.INFO.{config['name']}", details)))
    for name, config in consumers(level).items():
        request = {"stream_name": "q", "config": config | {"name": name, "durable_name": name}}
        await connection.api(f"CONSUMER.CREATE.q.{name}", request)
        answers.append((CONSUMER_FIELDS, await connection.api(f"CONSUMER.INFO.q.{name}")))
    answers.append((STREAM_FIELDS, await connection.api("STREAM.INFO.up", details)))
    return answers


@pytest.mark.parametrize("version", LEVELS)
async def test_the_table_has_every_field_that_a_server_reports(version: str) -> None:
    with NatsServer(binary=binary_of(version)) as server:
        async with connect(connection_settings({"servers": (server.url,)})) as connection:
            assert connection.api_level == LEVELS[version]
            answers = await read_everything(connection, LEVELS[version])
    assert [unknown_fields(table, answer, unset=True) for table, answer in answers] == [[]] * len(answers)
    # And the table has nothing that no server reports: each field of its level is set above.
    reported = {
        kind: {field for table, answer in answers if table is of for field in answer["config"]}
        for kind, of in (("queue", STREAM_FIELDS), ("consumer", CONSUMER_FIELDS))
    }
    unset: dict[str, set[str]] = {"queue": set(), "consumer": {"opt_start_seq", "opt_start_time", "direct", "sourcing"}}
    for kind in KINDS:
        known = {
            name for name, field in config_fields(kind).items() if field.level <= LEVELS[version] and "." not in name
        }
        assert known - reported[kind] <= unset[kind]


@pytest.mark.slow
async def test_the_table_has_every_field_of_a_cluster() -> None:
    with NatsCluster() as cluster:
        async with connect(connection_settings({"servers": cluster.urls})) as connection:
            config = {"name": "q", "subjects": ["q.>"], "retention": "workqueue", "num_replicas": 3}
            await connection.api("STREAM.CREATE.q", config)
            consumer = {"name": "w", "durable_name": "w", "ack_policy": "explicit"}
            await connection.api("CONSUMER.CREATE.q.w", {"stream_name": "q", "config": consumer})
            stream, workers = await connection.api("STREAM.INFO.q"), await connection.api("CONSUMER.INFO.q.w")
    assert len(stream["cluster"]["replicas"]) == 2
    assert unknown_fields(STREAM_FIELDS, stream, unset=True) == []
    assert unknown_fields(CONSUMER_FIELDS, workers, unset=True) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind}:{rule.field}:{rule.name}")
def test_each_rule_has_a_field_and_speaks_of_its_example_only(rule: Any) -> None:
    table = CONSUMER_FIELDS if rule.kind == "consumer" else STREAM_FIELDS
    assert rule.field in {field.path for field in table}
    assert rule.of_example()
    info = rule.example if "config" in rule.example else {"config": rule.example}
    for use in rule.uses:
        found = {finding.name: finding for finding in field_findings(rule.kind, info, use, name="w", queue="q")}
        assert isinstance(found[rule.name], rule.effect)
    default = {"durable_name": "w", "max_deliver": 1} if rule.kind == "consumer" else {"name": "q"}
    plain: dict[str, Any] = {"config": default, "ts": "now"}
    assert [finding.name for use in rule.uses for finding in field_findings(rule.kind, plain, use)] == []


def test_a_field_of_a_newer_server_is_named_where_it_has_a_value() -> None:
    config = {"name": "q", "subjects": ["q.>"], "allow_thing": True, "other": False, "placement": {"moon": "full"}}
    found = field_findings("queue", {"config": config}, "worker")
    assert [(finding.name, finding.partition(",")[0]) for finding in found] == [
        ("unknown-field", "q has config.allow_thing"),
        ("unknown-field", "q has config.placement.moon"),
    ]
    assert not any(isinstance(finding, Refusal) for finding in found)
