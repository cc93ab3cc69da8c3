"""The steps of scripts: each is one request or a few, drawn from what there is."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.errors import TransientError
from testbed.simulated.player import LATER

if TYPE_CHECKING:
    import random

    from testbed.simulated.player import Player

# Seconds. Long beside what a request takes on a busy machine.
ACK_WAIT: Final = 2.0
_NAMES_SUBJECTS: Final = 2
_FIXES_STORAGE: Final = 5
_AFTER_ACK_WAIT: Final = 2.6
_HEARD: Final = 0.05
_ACKNOWLEDGED_WITHIN: Final = 0.5
_SECOND: Final = 10**9
_LONG: Final = 5
_SUBJECTS: Final = ("a.x", "a.y", "b", "c")
PROBE: Final = {"batch": 1, "no_wait": True, "expires": _SECOND // 20, "max_bytes": 1}


def named(value: Any, name: str) -> Any:
    """Return JSON with the name of a stream in place of each percent sign."""
    match value:
        case dict():
            return {key: named(item, name) for key, item in value.items()}
        case list():
            return [named(item, name) for item in value]
        case str() if not value.endswith("0%"):
            return value.replace("%", name)
    return value


def _happens(rng: random.Random, share: float) -> bool:
    return rng.random() < share


def _body(rng: random.Random) -> bytes:
    return str(rng.randrange(100)).encode()


def _consumer(rng: random.Random) -> str:
    return rng.choice(["w", "w", "v"])


# Publishing.


async def publish(player: Player, rng: random.Random) -> None:
    """Publish without headers, or with an id."""
    headers = [("Nats-Msg-Id", f"id-{rng.randrange(4)}")] if _happens(rng, 0.3) else []
    await player.publish(rng.choice(_SUBJECTS), _body(rng), headers)


async def publish_id(player: Player, rng: random.Random) -> None:
    """Publish under one of few ids."""
    await player.publish(rng.choice(_SUBJECTS), _body(rng), [("Nats-Msg-Id", f"id-{rng.randrange(3)}")])


async def publish_condition(player: Player, rng: random.Random) -> None:
    """Publish under conditions."""
    few, subject = str(rng.randrange(6)), f"{player.name}.{rng.choice(_SUBJECTS)}"
    conditions = [
        [("Nats-Expected-Last-Subject-Sequence", few)],
        [("Nats-Expected-Last-Subject-Sequence", "0")],
        [("Nats-Expected-Last-Sequence", few)],
        [("Nats-Expected-Last-Msg-Id", f"id-{rng.randrange(3)}")],
        [("Nats-Expected-Stream", rng.choice([player.name, "other"]))],
        [("Nats-Rollup", rng.choice(["all", "sub"]))],
        [("Nats-TTL", rng.choice(["5s", "1", "0", "x"]))],
        [("Nats-Schedule", "@every 1h"), ("Nats-Schedule-Target", subject)],
    ]
    if player.level >= _NAMES_SUBJECTS:
        other = f"{player.name}.{rng.choice(['a.*', 'a.x', 'b'])}"
        named_subject = ("Nats-Expected-Last-Subject-Sequence-Subject", other)
        conditions.append([("Nats-Expected-Last-Subject-Sequence", few), named_subject])
    headers = rng.choice(conditions)
    if _happens(rng, 0.4):
        headers = [*headers, ("Nats-Msg-Id", f"id-{rng.randrange(3)}")]
    await player.publish(rng.choice(_SUBJECTS), _body(rng), headers)


async def publish_large(player: Player, rng: random.Random) -> None:
    """Publish a body of some size."""
    headers = [("Kind", "x" * rng.randrange(30))] if _happens(rng, 0.3) else []
    await player.publish(rng.choice(_SUBJECTS), b"x" * rng.choice([0, 5, 19, 20, 21, 60, 200]), headers)


async def publish_headers(player: Player, rng: random.Random) -> None:
    """Publish with headers of many forms."""
    forms = [
        [("Job-Id", "7")],
        [("Kind", "one"), ("Kind", "two")],
        [("Kind", "")],
        [("kind", "lower"), ("KIND", "upper")],
        [("Städte", "Köln")],
        [("nats-msg-id", f"id-{rng.randrange(2)}")],
        [("Nats-Msg-Id", f"id-{rng.randrange(2)}"), ("Kind", "a: b")],
        [("Nats-Stream", "forged"), ("Nats-Sequence", "77")],
        [("Nats-Msg-Id", ""), ("X", " spaces  ")],
    ]
    await player.publish(rng.choice(_SUBJECTS), _body(rng), rng.choice(forms))


async def publish_ttl(player: Player, rng: random.Random) -> None:
    """Publish a message that the server removes after a time."""
    ttl = rng.choice(["1s", "1", "never", "60s", "0", "-1", "1d", "x", "500ms"])
    await player.publish(rng.choice(_SUBJECTS), _body(rng), [("Nats-TTL", ttl)])


# Reading and removing.


async def get(player: Player, rng: random.Random) -> None:
    """Read a message."""
    subject, sequence = f"{player.name}.{rng.choice(_SUBJECTS)}", rng.randrange(1, 8)
    requests: list[dict[str, Any]] = [
        {"seq": sequence},
        {"last_by_subj": subject},
        {"seq": sequence, "next_by_subj": f"{player.name}.a.*"},
        {"next_by_subj": subject},
    ]
    await player.get(rng.choice(requests))


async def direct_get(player: Player, rng: random.Random) -> None:
    """Read a message with a direct get."""
    subject, sequence = f"{player.name}.{rng.choice(_SUBJECTS)}", rng.randrange(1, 8)
    if _happens(rng, 0.2):
        await player.direct_get({}, subject)
        return
    requests: list[dict[str, Any]] = [
        {"seq": sequence},
        {"last_by_subj": subject},
        {"seq": sequence, "next_by_subj": f"{player.name}.a.*"},
        {"next_by_subj": subject},
    ]
    await player.direct_get(rng.choice(requests))


async def direct_batch(player: Player, rng: random.Random) -> None:
    """Read several messages with a direct get."""
    request: dict[str, Any] = {"batch": rng.choice([1, 2, 3, 10]), "seq": rng.randrange(1, 8)}
    if _happens(rng, 0.5):
        request["next_by_subj"] = f"{player.name}.{rng.choice(['a.*', 'b', '>'])}"
    if _happens(rng, 0.3):
        request["max_bytes"] = rng.choice([1, 100, 1000])
    await player.direct_get(request)


async def direct_last(player: Player, rng: random.Random) -> None:
    """Read the last messages of subjects with a direct get."""
    filters = [f"{player.name}.{name}" for name in rng.choice([["a.*"], ["a.x", "b"], [">"], ["none"]])]
    request: dict[str, Any] = {"multi_last": filters}
    if _happens(rng, 0.4):
        request["batch"] = rng.choice([1, 2])
    await player.direct_get(request)


async def state(player: Player, rng: random.Random) -> None:
    """Read the state of a stream."""
    filter_ = f"{player.name}.{rng.choice(['>', 'a.*', 'b', 'none'])}"
    await player.api("STREAM.INFO.%", {"subjects_filter": filter_, "deleted_details": _happens(rng, 0.5)})


async def stored(player: Player, rng: random.Random) -> None:
    """Read all messages of a stream."""
    await asyncio.sleep(_HEARD)
    await player.stored(rng.choice(["", "-archive"]))


async def events(player: Player, _rng: random.Random) -> None:
    """Read what was announced."""
    await asyncio.sleep(_HEARD)
    await player.stored("-dead")


async def delete(player: Player, rng: random.Random) -> None:
    """Delete a message."""
    await player.api("STREAM.MSG.DELETE.%", {"seq": rng.randrange(1, 8), "no_erase": _happens(rng, 0.7)})


async def purge(player: Player, rng: random.Random) -> None:
    """Purge a subject."""
    await player.api("STREAM.PURGE.%", {"filter": f"{player.name}.{rng.choice(_SUBJECTS)}"})


async def purge_part(player: Player, rng: random.Random) -> None:
    """Purge up to a sequence, or but for the last messages."""
    request: dict[str, Any] = rng.choice([{"seq": rng.randrange(1, 8)}, {"keep": rng.randrange(1, 3)}, {}])
    if _happens(rng, 0.5):
        request = {**request, "filter": f"{player.name}.{rng.choice(['a.*', 'b'])}"}
    await player.api("STREAM.PURGE.%", request)


# Deliveries.


async def take(player: Player, rng: random.Random) -> None:
    """Take a message and acknowledge it."""
    before = len(player.deliveries)
    await player.pull(_consumer(rng), {"batch": 1, "no_wait": True, "expires": _SECOND // 10}, wait=0.7)
    if len(player.deliveries) > before:
        await player.answer(player.deliveries[-1], b"+ACK")


async def pull(player: Player, rng: random.Random) -> None:
    """Pull in one of the forms that the package uses."""
    forms: list[dict[str, Any]] = [
        {"no_wait": True, "expires": _SECOND // 10},
        {"expires": _SECOND // 5},
        {"no_wait": True},
    ]
    request = {"batch": rng.choice([1, 1, 2, 3])} | rng.choices(forms, [4, 5, 1])[0]
    await player.pull(_consumer(rng), request, wait=0.7)


def _form(rng: random.Random) -> dict[str, Any]:
    request: dict[str, Any] = {"batch": rng.choice([1, 1, 2, 3])}
    if (expires := rng.choice([0, 2, 2, 3, 5])) or _happens(rng, 0.5):
        request["expires"] = expires * _SECOND // 10
    if _happens(rng, 0.5):
        request["no_wait"] = True
    if _happens(rng, 0.3):
        request["max_bytes"] = rng.choice([1, 40, 100, 1000])
    if _happens(rng, 0.2) and expires == _LONG:
        request["idle_heartbeat"] = _SECOND // 5
    return request


async def pull_form(player: Player, rng: random.Random) -> None:
    """Pull in any form."""
    await player.pull(_consumer(rng), _form(rng), wait=0.8)


async def pulls(player: Player, rng: random.Random) -> None:
    """Send two pull requests at once."""
    forms = [_form(rng) | {"expires": _SECOND * tenths // 10, "no_wait": False} for tenths in (3, 5)]
    await player.pull(_consumer(rng), *forms, wait=0.9)


async def pull_refused(player: Player, rng: random.Random) -> None:
    """Send a pull request that the server may refuse."""
    requests: list[object] = [
        {"batch": 300, "expires": _SECOND // 10},
        {"batch": 1, "expires": _SECOND // 5, "idle_heartbeat": _SECOND // 5},
        {"batch": 1, "idle_heartbeat": _SECOND // 5},
        {"batch": -1},
        b"",
        b"2",
        b"{",
    ]
    await player.pull(_consumer(rng), rng.choice(requests), wait=0.7)


async def probe(player: Player, rng: random.Random) -> None:
    """Send the package's probe."""
    await player.pull(_consumer(rng), PROBE, wait=1)


async def answer(player: Player, rng: random.Random) -> None:
    """Answer a delivery, at times an earlier one."""
    if not player.deliveries:
        return
    delivery = player.deliveries[-1 - min(rng.randrange(4), len(player.deliveries) - 1)]
    body = rng.choices(
        [b"+ACK", b"-NAK", b'-NAK {"delay": 2600000000}', b"+TERM", b"+TERM broken", b"+WPI", b"", b"-NAK {", b"junk"],
        [12, 8, 2, 4, 2, 2, 2, 1, 1],
    )[0]
    await player.answer(delivery, body)


async def wait(_player: Player, _rng: random.Random) -> None:
    """Let ack waits pass."""
    await asyncio.sleep(_AFTER_ACK_WAIT)


async def info(player: Player, rng: random.Random) -> None:
    """Read the state of a consumer."""
    # A consumer hears of new messages a moment after they are stored.
    await asyncio.sleep(_HEARD)
    await player.api(f"CONSUMER.INFO.%.{_consumer(rng)}")


async def later(player: Player, _rng: random.Random) -> None:
    """Read the state of the consumers once all ack waits have passed."""
    await asyncio.sleep(2 * _AFTER_ACK_WAIT)
    for consumer in ("w", "v"):
        answer = await player.connection.api_request(f"CONSUMER.INFO.{player.name}.{consumer}")
        player.note(f"{LATER}{consumer}", json.loads(answer))


# Consumers.


async def update(player: Player, rng: random.Random) -> None:
    """Change how often a consumer delivers."""
    await asyncio.sleep(_HEARD)
    consumer = _consumer(rng)
    info = json.loads(await player.connection.api_request(f"CONSUMER.INFO.{player.name}.{consumer}"))
    if "config" not in info:
        return
    config = {name: value for name, value in info["config"].items() if name != "metadata"}
    config["max_deliver"] = rng.choice([1, 2, 3, 5])
    await player.api(
        f"CONSUMER.CREATE.%.{consumer}", {"stream_name": player.name, "config": config, "action": "update"}
    )


async def move(player: Player, rng: random.Random) -> None:
    """Move a subject from one consumer to the other, or leave it to none."""
    await asyncio.sleep(_HEARD)
    filters: dict[str, list[str]] = {}
    configs: dict[str, dict[str, Any]] = {}
    for consumer in ("w", "v"):
        info = json.loads(await player.connection.api_request(f"CONSUMER.INFO.{player.name}.{consumer}"))
        config = {name: value for name, value in info["config"].items() if name != "metadata"}
        one, several = config.pop("filter_subject", None), config.pop("filter_subjects", None)
        filters[consumer], configs[consumer] = several or [one], config
    before, after = rng.sample(["w", "v"], 2)
    moved = rng.choice(filters[before])
    filters[before].remove(moved)
    if _happens(rng, 0.8):
        filters[after].append(moved)
    for consumer in (before, after):
        config = configs[consumer] | {"filter_subjects": filters[consumer] or [f"{player.name}.none.{consumer}"]}
        request = {"stream_name": player.name, "config": config, "action": "update"}
        await player.api(f"CONSUMER.CREATE.%.{consumer}", request)


async def acknowledge_late(player: Player, rng: random.Random) -> None:
    """Acknowledge a message, of either consumer, as a redrive does that removes a dead job."""
    subject = f"$JS.ACK.{player.name}.{_consumer(rng)}.1.{rng.randrange(1, 8)}.1.0.0"
    try:
        await player.connection.request(subject, b"+ACK", time_limit=_ACKNOWLEDGED_WITHIN)
        player.note(subject, "confirmed")
    except TransientError:
        player.note(subject, "no answer")
    await player.api("STREAM.INFO.%", {"deleted_details": True})


async def pause(player: Player, rng: random.Random) -> None:
    """Pause a consumer, for long."""
    until = datetime.now(UTC) + timedelta(hours=1)
    await _quiet(
        player, f"CONSUMER.PAUSE.%.{_consumer(rng)}", {"pause_until": until.isoformat().replace("+00:00", "Z")}
    )


async def resume(player: Player, rng: random.Random) -> None:
    """End the pause of a consumer."""
    await _quiet(player, f"CONSUMER.PAUSE.%.{_consumer(rng)}", {})


async def _quiet(player: Player, subject: str, request: dict[str, Any]) -> None:
    """Send a request that isn't compared, since it has a time in it; its answer is."""
    answer = json.loads(
        await player.connection.api_request(subject.replace("%", player.name), json.dumps(request).encode())
    )
    player.note(subject, answer)


async def reset(player: Player, rng: random.Random) -> None:
    """Reset a consumer."""
    await asyncio.sleep(_HEARD)
    info = json.loads(await player.connection.api_request(f"STREAM.INFO.{player.name}"))
    # To what isn't stored yet nobody resets; the server's count of what is pending is wrong then.
    last = int(info["state"]["last_seq"])
    request = rng.choice([{}, {"seq": rng.randrange(1, last + 2)}, {"seq": 1}])
    await player.api(f"CONSUMER.RESET.%.{_consumer(rng)}", request)


async def create(player: Player, rng: random.Random) -> None:
    """Create or change a consumer, at times one that the server refuses."""
    name = rng.choice(["w", "v", "x", "y"])
    config: dict[str, Any] = {"durable_name": name, "ack_policy": rng.choice(["explicit"] * 6 + ["none", "all"])}
    filters: list[dict[str, Any]] = [
        *({"filter_subject": f"{player.name}.{part}"} for part in ("a.>", "b", "c", "d", "a.x")),
        *({"filter_subjects": [f"{player.name}.{part}" for part in parts]} for parts in (("c", "d"), ("c.*", "c.x"))),
        {},
    ]
    config |= rng.choice(filters)
    options: list[dict[str, Any]] = [
        *({"max_deliver": 3}, {"max_deliver": 0}, {"backoff": [_SECOND, 2 * _SECOND], "max_deliver": 5}),
        *({"backoff": [_SECOND, 2 * _SECOND], "max_deliver": 1}, {"ack_wait": 5 * _SECOND}, {"max_waiting": 7}),
        *({"sample_freq": "100%"}, {"sample_freq": "50"}, {"sample_freq": "abc"}, {"max_ack_pending": 5}),
        *({"deliver_policy": "new"}, {"description": "text"}, {"headers_only": True}, {"mem_storage": True}),
    ]
    for option in rng.sample(options, 2):
        config |= option
    if player.level < _FIXES_STORAGE:
        config.pop("mem_storage", None)
    request: dict[str, Any] = {"stream_name": player.name, "config": config}
    if action := rng.choice(["", "", "create", "update"]):
        request["action"] = action
    await player.api(f"CONSUMER.CREATE.%.{name}", request)


async def remove_consumer(player: Player, rng: random.Random) -> None:
    """Delete a consumer that other steps don't need."""
    await player.api(f"CONSUMER.DELETE.%.{rng.choice(['x', 'y'])}")


async def names(player: Player, _rng: random.Random) -> None:
    """List the consumers."""
    await player.api("CONSUMER.NAMES.%")


async def error(player: Player, rng: random.Random) -> None:
    """Send a request that the server refuses."""
    name, filter_ = player.name, f"{player.name}.a.>"
    explicit = {"ack_policy": "explicit"}
    other = {"name": f"{name}-other", "subjects": [f"other.{name}"]}
    requests: list[tuple[str, object]] = [
        ("STREAM.CREATE.%", {"name": name, "subjects": [f"{name}.>"]}),
        ("STREAM.CREATE.%-other", {"name": f"{name}-other", "subjects": [f"{name}.a.x"]}),
        ("STREAM.CREATE.%-other", {"name": "another", "subjects": ["x"]}),
        ("STREAM.CREATE.%-other", {**other, "subjects": ["a..b"]}),
        ("STREAM.CREATE.%-other", {**other, "duplicate_window": 20 * _SECOND, "max_age": 10 * _SECOND}),
        ("STREAM.CREATE.%-other", {**other, "retention": "work"}),
        ("STREAM.CREATE.%-other", {**other, "discard_new_per_subject": True}),
        ("STREAM.CREATE.%-other", b"{"),
        ("STREAM.UPDATE.%-other", {**other, "retention": "workqueue"}),
        ("STREAM.INFO.%-none", None),
        ("STREAM.UPDATE.%-none", {"name": f"{name}-none", "subjects": ["x"]}),
        ("STREAM.DELETE.%-none", None),
        ("STREAM.PURGE.%-none", None),
        ("STREAM.PURGE.%", {}),
        ("STREAM.MSG.GET.%", {"seq": 99}),
        ("STREAM.MSG.GET.%", {"last_by_subj": f"{name}.none"}),
        ("STREAM.MSG.GET.%", {}),
        ("STREAM.MSG.GET.%-none", {"seq": 1}),
        ("STREAM.MSG.DELETE.%", {"seq": 99}),
        ("STREAM.MSG.DELETE.%", {"seq": 1}),
        ("STREAM.MSG.DELETE.%", b""),
        ("CONSUMER.INFO.%.none", None),
        ("CONSUMER.INFO.%-none.w", None),
        ("CONSUMER.DELETE.%.none", None),
        ("CONSUMER.CREATE.%.z", {"stream_name": name, "config": {"durable_name": "z", **explicit}}),
        (
            f"CONSUMER.CREATE.%.z.{filter_}",
            {"stream_name": name, "config": {"name": "z", "filter_subject": filter_, **explicit}},
        ),
        ("CONSUMER.CREATE.%.z", {"stream_name": name, "config": {"durable_name": "z", "ack_policy": "none"}}),
        ("CONSUMER.CREATE.%.z", {"stream_name": name, "config": {"durable_name": "z", "ack_policy": "all"}}),
        ("CONSUMER.CREATE.%.w", {"stream_name": name, "config": {"durable_name": "w", **explicit}, "action": "create"}),
        (
            "CONSUMER.CREATE.%.none",
            {"stream_name": name, "config": {"durable_name": "none", **explicit}, "action": "update"},
        ),
        ("CONSUMER.CREATE.%.z", {"stream_name": "another", "config": {"durable_name": "z", **explicit}}),
        ("CONSUMER.CREATE.%.z", {"stream_name": name, "config": {"durable_name": "y", **explicit}}),
        (
            "CONSUMER.CREATE.%.w",
            {"stream_name": name, "config": {"durable_name": "w", "deliver_policy": "new", **explicit}},
        ),
    ]
    subject, request = rng.choice(requests)
    await player.api(subject, request)
