"""Scripts of requests that are played on the simulated and on a real server, and what each answers.

A script is made of a seed. What it does depends only on the seed and on what was answered before, so that both servers
play the same one as long as they answer alike.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.headers import parse_headers

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Connection

# Seconds. Long beside what a request takes on a busy machine.
ACK_WAIT: Final = 2.0
DEAD: Final = "-dead"
_AFTER_ACK_WAIT: Final = 2.6
_SETTLED: Final = 0.3
_HEARD: Final = 0.05
_NANOSECONDS: Final = 10**9
_EXACT_FLOORS: Final = 5
# What differs by the moment, by the machine, or by what the script is called.
_LEFT_OUT: Final = {
    *("ts", "created", "first_ts", "last_ts", "time", "timestamp", "id", "ack_time", "config", "cluster", "did_create"),
    *("total", "offset", "limit", "bytes", "pause_remaining", "pause_until", "memory", "storage", "api", "limits"),
    *("push_bound", "last_active", "priority_groups", "domain", "type", "account"),
}
_HEADERS_LEFT_OUT: Final = {"Nats-Time-Stamp", "Nats-Pending-Bytes"}


@dataclass(slots=True)
class Delivery:
    """A message that a consumer has delivered, and to which an answer may be sent."""

    sequence: int
    reply: str


@dataclass
class Player:
    """Plays scripts on one server, and keeps what it answers.

    :param name: what its streams are called
    """

    connection: Connection
    name: str
    transcript: list[Any] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)

    def note(self, what: str, answer: Any) -> None:
        """Keep an answer."""
        self.transcript.append((what, self._renamed(answer)))

    def _renamed(self, answer: Any) -> Any:
        match answer:
            case dict():
                return {
                    self._renamed(key): self._renamed(value)
                    for key, value in answer.items()
                    if key not in self.left_out
                }
            case list() | tuple():
                return [self._renamed(item) for item in answer]
            case str():
                return answer.replace(self.name, "q")
        return answer

    @property
    def left_out(self) -> set[str]:
        """What isn't compared."""
        # Before 2.15 the floor follows a death or a purge by a timer of the server's.
        return _LEFT_OUT if self.connection.api_level >= _EXACT_FLOORS else _LEFT_OUT | {"ack_floor"}

    async def api(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request to JetStream's API."""
        payload = json.dumps(request).encode() if request is not None else b""
        answer = json.loads(await self.connection.api_request(subject.replace("%", self.name), payload))
        self.note(subject, answer)
        return dict(answer)

    async def publish(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Publish a message that a stream answers."""
        answer = json.loads(await self.connection.publish_acknowledged(f"{self.name}.{subject}", body, headers))
        self.note(f"publish {subject} {headers}", answer)

    async def pull(self, consumer: str, request: dict[str, Any], *, wait: float) -> None:
        """Send a pull request, and note what comes within some seconds."""
        found: list[Any] = []
        ended = asyncio.Event()

        def receive(subject: bytes, reply: bytes, headers: bytes | None, body: bytes) -> None:
            if reply.startswith(b"$JS.ACK."):
                tokens = reply.decode().split(".")
                self.deliveries.append(Delivery(int(tokens[5]), reply.decode()))
                shown = [tokens[4], tokens[5], tokens[6], tokens[8], subject.decode(), _shown(headers), body.decode()]
            else:
                shown = [_shown(headers)]
                ended.set()
            found.append(shown)
            if len(found) == request["batch"]:
                ended.set()

        inbox = self.connection.new_inbox()
        subscription = await self.connection.subscribe_raw(inbox, receive)
        try:
            await self.connection.publish(
                f"{self.connection.api_prefix}.CONSUMER.MSG.NEXT.{self.name}.{consumer}",
                json.dumps(request).encode(),
                reply=inbox,
            )
            try:
                async with asyncio.timeout(wait):
                    await ended.wait()
            except TimeoutError:
                found.append("no end")
        finally:
            await subscription.unsubscribe()
        self.note(f"pull {consumer} {request}", found)

    async def answer(self, delivery: Delivery, body: bytes) -> None:
        """Send an answer to a delivery, and note whether the server confirms it."""
        try:
            answer = await self.connection.request(delivery.reply, body, time_limit=0.5)
            self.note(f"{body.decode()} {delivery.sequence}", answer.decode())
        except Exception as error:  # noqa: BLE001
            self.note(f"{body.decode()} {delivery.sequence}", type(error).__name__)

    async def stored(self, stream: str) -> None:
        """Note what a stream stores."""
        info = json.loads(await self.connection.api_request(f"STREAM.INFO.{self.name}{stream}"))
        found: list[Any] = []
        for sequence in range(info["state"]["first_seq"] or 1, info["state"]["last_seq"] + 1):
            request = json.dumps({"seq": sequence}).encode()
            answer = json.loads(await self.connection.api_request(f"STREAM.MSG.GET.{self.name}{stream}", request))
            message = answer.get("message") or {}
            data = base64.b64decode(message.get("data") or b"").decode()
            headers = _shown(base64.b64decode(message.get("hdrs") or b""))
            try:
                body = json.loads(data)
            except ValueError:
                body = data
            found.append([message.get("subject"), headers, body, answer.get("error")])
        if stream == DEAD:
            # Messages that die at the same moment are announced in any order.
            found.sort(key=str)
        self.note(f"stored in {stream or 'the queue'}", found)


def _happens(rng: random.Random, share: float) -> bool:
    return rng.random() < share


def _shown(headers: bytes | None) -> Any:
    if not headers:
        return []
    status = headers[9:].partition(b"\r\n")[0].decode() if headers.startswith(b"NATS/1.0 ") else ""
    return [status, *[[name, str(value)] for name, value in parse_headers(headers) if name not in _HEADERS_LEFT_OUT]]


async def play(connection: Connection, name: str, seed: int, *, steps: int = 24) -> list[Any]:
    """Play one script, and return what was answered.

    :param name: not the name of any stream
    """
    player, rng = Player(connection, name), random.Random(seed)  # noqa: S311
    await _prepare(player, rng)
    for _ in range(steps):
        await _step(player, rng)
    await asyncio.sleep(_SETTLED)
    for consumer in ("w", "v"):
        await player.pull(
            consumer, {"batch": 1, "no_wait": True, "expires": _NANOSECONDS // 20, "max_bytes": 1}, wait=1
        )
    await asyncio.sleep(_SETTLED)
    for stream in ("", DEAD, "-archive"):
        await player.api(f"STREAM.INFO.%{stream}", {"subjects_filter": ">", "deleted_details": True})
        await player.stored(stream)
    await player.api("CONSUMER.LIST.%")
    return player.transcript


async def _prepare(player: Player, rng: random.Random) -> None:
    name = player.name
    stream: dict[str, Any] = {
        "name": name,
        "subjects": [f"{name}.>"],
        "retention": "workqueue",
        "storage": "memory",
        "allow_direct": True,
        "republish": {"src": f"{name}.>", "dest": f"archive.{name}.>"},
    }
    if _happens(rng, 0.3):
        stream |= {"max_msgs": rng.choice([2, 4, 6]), "discard": rng.choice(["new", "old"])}
    if _happens(rng, 0.2):
        stream |= {"max_msgs_per_subject": rng.choice([1, 2])}
    if _happens(rng, 0.2):
        stream |= {"deny_delete": True}
    await player.api(f"STREAM.CREATE.{name}", stream)
    events = [
        f"$JS.EVENT.ADVISORY.CONSUMER.{kind}.{name}.*" for kind in ("MAX_DELIVERIES", "MSG_TERMINATED", "MSG_NAKED")
    ]
    events += [f"$JS.EVENT.METRIC.CONSUMER.ACK.{name}.*"]
    await player.api(f"STREAM.CREATE.{name}-dead", {"name": f"{name}-dead", "subjects": events, "storage": "memory"})
    archive = {"name": f"{name}-archive", "subjects": [f"archive.{name}.>"], "storage": "memory"}
    await player.api(f"STREAM.CREATE.{name}-archive", archive)
    for consumer, filter_ in (("w", f"{name}.a.>"), ("v", f"{name}.b")):
        config: dict[str, Any] = {
            "durable_name": consumer,
            "filter_subject": filter_,
            "ack_policy": "explicit",
            "ack_wait": int(ACK_WAIT * _NANOSECONDS),
            "max_deliver": rng.choice([-1, 1, 1, 2, 2, 3]),
            "sample_freq": rng.choice(["100%", "0%"]),
        }
        if _happens(rng, 0.2):
            config["max_ack_pending"] = rng.choice([1, 2])
        request = {"stream_name": name, "config": config}
        await player.api(f"CONSUMER.CREATE.%.{consumer}.{filter_}", request)


async def _step(player: Player, rng: random.Random) -> None:  # noqa: C901, PLR0912
    consumer, subject = rng.choice(["w", "w", "v"]), rng.choice(["a.x", "a.y", "b", "c"])
    kind = rng.choices(
        ["publish", "pull", "answer", "wait", "info", "get", "remove", "probe", "update"], [6, 6, 9, 2, 2, 2, 1, 2, 1]
    )[0]
    match kind:
        case "publish":
            headers: dict[str, str] = {}
            if _happens(rng, 0.4):
                headers["Nats-Msg-Id"] = f"id-{rng.randrange(4)}"
            if _happens(rng, 0.1):
                headers["Nats-Expected-Last-Subject-Sequence"] = str(rng.randrange(5))
            if _happens(rng, 0.05):
                headers[rng.choice(["Nats-Rollup", "Nats-TTL"])] = rng.choice(["all", "sub", "5s"])
            await player.publish(subject, str(rng.randrange(100)).encode(), headers)
        case "pull":
            batch = rng.choice([1, 1, 2, 3])
            request: dict[str, Any] = {"batch": batch}
            forms: list[dict[str, Any]] = [
                {"no_wait": True, "expires": _NANOSECONDS // 10},
                {"expires": _NANOSECONDS // 5},
                {"no_wait": True},
            ]
            request |= rng.choices(forms, [4, 5, 1])[0]
            await player.pull(consumer, request, wait=0.7)
        case "answer" if player.deliveries:
            delivery = player.deliveries[-1 - min(rng.randrange(4), len(player.deliveries) - 1)]
            body = rng.choices(
                [b"+ACK", b"-NAK", b'-NAK {"delay": 2600000000}', b"+TERM", b"+TERM broken", b"+WPI", b""],
                [6, 4, 1, 2, 1, 1, 1],
            )[0]
            await player.answer(delivery, body)
        case "wait":
            await asyncio.sleep(_AFTER_ACK_WAIT)
        case "info":
            # A consumer hears of new messages a moment after they are stored.
            await asyncio.sleep(_HEARD)
            await player.api(f"CONSUMER.INFO.%.{consumer}")
        case "get":
            request = rng.choice(
                [
                    {"seq": rng.randrange(1, 6)},
                    {"last_by_subj": f"{player.name}.{subject}"},
                    {"seq": rng.randrange(1, 6), "next_by_subj": f"{player.name}.a.*"},
                ]
            )
            answer = json.loads(
                await player.connection.api_request(f"STREAM.MSG.GET.{player.name}", json.dumps(request).encode())
            )
            message = answer.get("message") or {}
            player.note(f"get {request}", [message.get("subject"), message.get("seq"), answer.get("error")])
        case "remove":
            if _happens(rng, 0.5):
                await player.api("STREAM.MSG.DELETE.%", {"seq": rng.randrange(1, 6), "no_erase": True})
            else:
                await player.api("STREAM.PURGE.%", {"filter": f"{player.name}.{subject}"})
        case "probe":
            request = {"batch": 1, "no_wait": True, "expires": _NANOSECONDS // 20, "max_bytes": 1}
            await player.pull(consumer, request, wait=1)
        case "update":
            await _update(player, rng, consumer)


async def _update(player: Player, rng: random.Random, consumer: str) -> None:
    await asyncio.sleep(_HEARD)
    info = json.loads(await player.connection.api_request(f"CONSUMER.INFO.{player.name}.{consumer}"))
    config = {name: value for name, value in info["config"].items() if name != "metadata"}
    config["max_deliver"] = rng.choice([1, 2, 3, 5])
    await player.api(
        f"CONSUMER.CREATE.%.{consumer}", {"stream_name": player.name, "config": config, "action": "update"}
    )
