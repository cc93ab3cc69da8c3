"""Scripts of requests that are played on the simulated and on a real server, and what each answers.

A script is made of its kind and a number. What it does depends only on these and on what was answered before, so that
both servers play the same one as long as they answer alike.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from testbed.simulated import script_steps as steps
from testbed.simulated.player import DEAD, Player

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow_provider_jetstream.jetstream import Connection

_SETTLED: Final = 0.3
_STEPS: Final = 24


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of scripts.

    :param weights: how often each step is drawn
    :param streams: the configurations of which one is drawn for the queue
    :param consumers: likewise for both consumers
    :param level: the level of JetStream's API from which on there is such a thing
    :param configs: whether configurations are compared
    """

    weights: Mapping[str, int]
    streams: tuple[dict[str, Any], ...] = ({},)
    consumers: tuple[dict[str, Any], ...] = ({},)
    level: int = 0
    configs: bool = False
    steps: int = _STEPS


@dataclass(frozen=True, slots=True)
class Script:
    """One script."""

    kind: str
    number: int

    @property
    def name(self) -> str:
        """What its streams are called."""
        return f"{self.kind}{self.number}"

    def is_for(self, level: int) -> bool:
        """Return whether a server has what it is about."""
        return KINDS[self.kind].level <= level


_NEW, _OLD = {"discard": "new"}, {"discard": "old"}
_SECOND: Final = 10**9

KINDS: Final[dict[str, Kind]] = {
    # Everything at once.
    "mixed": Kind(
        {
            "publish": 6,
            "pull": 6,
            "answer": 9,
            "wait": 2,
            "info": 2,
            "get": 2,
            "delete": 1,
            "purge": 1,
            "probe": 2,
            "update": 1,
        },
        streams=(
            *({}, {}, {}, {"max_msgs": 4, **_NEW}, {"max_msgs": 4, **_OLD}),
            *({"max_msgs_per_subject": 2}, {"deny_delete": True}),
        ),
        consumers=({}, {}, {}, {"max_ack_pending": 1}, {"max_ack_pending": 2}),
    ),
    # Message ids, conditions and expectations.
    "publish": Kind(
        {"publish_id": 8, "publish_condition": 8, "publish": 2, "take": 2, "delete": 1, "wait": 1, "get": 1},
        streams=({}, {"duplicate_window": _SECOND}, {"max_msgs": 3, **_NEW}, {"max_msgs_per_subject": 1}),
    ),
    "limits": Kind(
        {"publish": 9, "publish_large": 4, "publish_id": 3, "take": 2, "delete": 1, "purge": 1, "state": 2},
        streams=(
            *({"max_msgs": count, **discard} for count in (1, 3) for discard in (_NEW, _OLD)),
            *({"max_bytes": size, **discard} for size in (150, 400) for discard in (_NEW, _OLD)),
            *({"max_msgs_per_subject": count, **discard} for count in (1, 2) for discard in (_NEW, _OLD)),
            *({"max_msgs_per_subject": count, "discard_new_per_subject": True, **_NEW} for count in (1, 2)),
            *({"max_msg_size": 20}, {"max_msgs": 4, "max_msgs_per_subject": 2, "max_bytes": 300}),
        ),
    ),
    # Messages of some age are removed.
    "age": Kind(
        {"publish": 6, "wait": 3, "state": 2, "get": 2, "info": 1, "publish_id": 2},
        streams=({"max_age": 3 * _SECOND // 2, "duplicate_window": _SECOND},),
        steps=14,
    ),
    "pulls": Kind(
        {"publish": 7, "pull_form": 9, "pulls": 3, "answer": 3, "probe": 2, "info": 1, "pull_refused": 2},
        consumers=(
            *({}, {}, {"max_waiting": 1}, {"max_batch": 2}, {"max_expires": 4 * _SECOND // 10}, {"max_bytes": 60}),
            *({"max_ack_pending": 1}, {"max_ack_pending": 2}, {"headers_only": True}),
        ),
    ),
    # Ends of deliveries.
    "ends": Kind(
        {"publish": 5, "pull": 7, "answer": 10, "wait": 2, "info": 3, "probe": 2, "later": 1},
        consumers=(
            *({"max_deliver": 1}, {"max_deliver": 2}, {"max_deliver": 3}, {}, {"max_deliver": 2, "max_ack_pending": 1}),
            *({"max_deliver": 4, "backoff": [_SECOND, 2 * _SECOND]}, {"max_deliver": 3, "backoff": [2 * _SECOND]}),
        ),
    ),
    # What is announced of them.
    "events": Kind(
        {"publish": 4, "pull": 7, "answer": 10, "wait": 3, "delete": 2, "purge": 1, "probe": 3, "events": 1},
        consumers=tuple(
            {"max_deliver": count, "sample_freq": share} for count in (1, 2, 3) for share in ("100%", "100", "0%", "")
        ),
    ),
    # Consumers whose subjects another tool moves, and acknowledgements by a consumer that never had the message.
    "moves": Kind(
        {"publish": 6, "pull": 6, "answer": 6, "move": 3, "acknowledge_late": 5, "info": 2, "probe": 2},
        consumers=({}, {"max_deliver": 1}, {"max_deliver": 2}),
    ),
    "pause": Kind(
        {"publish": 5, "pull": 6, "answer": 6, "pause": 4, "resume": 3, "wait": 1, "info": 4},
        consumers=({}, {"max_deliver": 2}),
        level=1,
    ),
    "reset": Kind(
        {"publish": 5, "pull": 7, "answer": 7, "reset": 4, "wait": 2, "info": 4, "delete": 1},
        consumers=({}, {"max_deliver": 1}, {"max_deliver": 2}, {"max_ack_pending": 2}),
        level=4,
    ),
    # What is removed, and how it is read.
    "reads": Kind(
        {"publish": 6, "delete": 3, "purge": 3, "purge_part": 3, "get": 4, "direct_get": 6, "state": 3, "take": 2},
        streams=({}, {"retention": "limits"}, {"deny_purge": True}, {"deny_delete": True}, {"allow_direct": False}),
    ),
    "batched_reads": Kind(
        {"publish": 6, "delete": 1, "direct_batch": 8, "direct_last": 3, "take": 1},
        streams=({}, {"retention": "limits"}),
        level=1,
    ),
    "republish": Kind(
        {"publish": 8, "publish_headers": 4, "publish_condition": 3, "take": 2, "delete": 1, "stored": 1},
        streams=(
            *({}, {"republish": {"src": ">", "dest": "archive.%.>"}}),
            *({"republish": {"src": "%.a.*", "dest": "archive.%.only.{{wildcard(1)}}"}},),
            *({"republish": {"src": ">", "dest": "archive.%.>", "headers_only": True}}, {"max_msgs": 2, **_NEW}),
        ),
    ),
    "headers": Kind(
        {"publish_headers": 9, "publish": 2, "pull": 4, "get": 3, "direct_get": 3, "answer": 2, "stored": 1},
    ),
    "ttl": Kind(
        {"publish_ttl": 6, "publish": 2, "wait": 2, "state": 2, "get": 1},
        streams=({"allow_msg_ttl": True}, {"allow_msg_ttl": True, "retention": "limits"}, {}),
        level=1,
        steps=14,
    ),
    # Errors by code.
    "errors": Kind({"error": 12, "publish": 1}, streams=({}, {"deny_delete": True, "deny_purge": True})),
    "consumers": Kind(
        {"create": 8, "update": 3, "remove_consumer": 2, "info": 2, "publish": 3, "pull": 2, "names": 1},
        streams=({}, {"retention": "limits"}),
        configs=True,
    ),
}


def scripts(each: int, kinds: tuple[str, ...] = ()) -> Iterator[Script]:
    """Return some scripts of each kind.

    :param kinds: only these
    """
    for kind in kinds or KINDS:
        for number in range(each):
            yield Script(kind, number)


async def play(connection: Connection, script: Script) -> list[Any]:
    """Play one script, and return what was answered."""
    kind = KINDS[script.kind]
    player, rng = Player(connection, script.name, configs=kind.configs), random.Random(script.name)  # noqa: S311
    await _prepare(player, rng, kind)
    for _ in range(kind.steps):
        name = rng.choices(list(kind.weights), list(kind.weights.values()))[0]
        await getattr(steps, name)(player, rng)
    await asyncio.sleep(_SETTLED)
    for consumer in ("w", "v"):
        await player.pull(consumer, steps.PROBE, wait=1)
    await asyncio.sleep(_SETTLED)
    for stream in ("", DEAD, "-archive"):
        await player.api(f"STREAM.INFO.%{stream}", {"subjects_filter": ">", "deleted_details": True})
        await player.stored(stream)
    await player.api("CONSUMER.LIST.%")
    return player.transcript


async def _prepare(player: Player, rng: random.Random, kind: Kind) -> None:
    name = player.name
    stream: dict[str, Any] = {
        "name": name,
        "subjects": [f"{name}.>"],
        "retention": "workqueue",
        "storage": "memory",
        "allow_direct": True,
        "republish": {"src": f"{name}.>", "dest": f"archive.{name}.>"},
    }
    await player.api(f"STREAM.CREATE.{name}", steps.named(stream | rng.choice(kind.streams), name))
    events = [
        f"$JS.EVENT.ADVISORY.CONSUMER.{event}.{name}.*" for event in ("MAX_DELIVERIES", "MSG_TERMINATED", "MSG_NAKED")
    ]
    events += [f"$JS.EVENT.METRIC.CONSUMER.ACK.{name}.*"]
    await player.api(f"STREAM.CREATE.{name}-dead", {"name": f"{name}-dead", "subjects": events, "storage": "memory"})
    archive: dict[str, Any] = {"name": f"{name}-archive", "subjects": [f"archive.{name}.>"], "storage": "memory"}
    await player.api(f"STREAM.CREATE.{name}-archive", archive)
    for consumer, filter_ in (("w", f"{name}.a.>"), ("v", f"{name}.b")):
        config: dict[str, Any] = {
            "durable_name": consumer,
            "filter_subject": filter_,
            "ack_policy": "explicit",
            "ack_wait": int(steps.ACK_WAIT * _SECOND),
            "max_deliver": rng.choice([-1, 1, 1, 2, 2, 3]),
            "sample_freq": rng.choice(["100%", "0%"]),
        } | rng.choice(kind.consumers)
        await player.api(f"CONSUMER.CREATE.%.{consumer}.{filter_}", {"stream_name": name, "config": config})
