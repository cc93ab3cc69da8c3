"""What plays a script on a server, simulated or real, and keeps what the server answers."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.headers import Headers, parse_headers
from airflow_provider_jetstream.jetstream.client.streams import is_last_of_batch
from airflow_provider_jetstream.jetstream.client.wire import encode_message, encode_subject
from airflow_provider_jetstream.jetstream.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from airflow_provider_jetstream.jetstream import Connection

DEAD: Final = "-dead"
LATER: Final = "later "
_SHOWS_STORED: Final = 1
# What differs by the moment, by the machine, or by what the script is called.
_LEFT_OUT: Final = {
    *("ts", "created", "first_ts", "last_ts", "time", "timestamp", "id", "ack_time", "cluster", "did_create"),
    *("total", "offset", "limit", "pause_remaining", "pause_until", "memory", "storage", "api", "limits"),
    *("push_bound", "last_active", "priority_groups", "domain", "type", "account", "metadata"),
}
_HEADERS_LEFT_OUT: Final = {"Nats-Time-Stamp", "Nats-Pending-Bytes", "Nats-UpTo-Sequence", "Nats-Time"}
_COPIES: Final = (DEAD, "-archive")
# Between requests that go together.
_AFTER: Final = 0.03
_INVALID_JSON: Final = 10025
_ANSWERED_WITHIN: Final = 3.0


@dataclass(slots=True)
class Delivery:
    """A message that a consumer has delivered, and to which an answer may be sent."""

    sequence: int
    reply: str


@dataclass
class Player:
    """Plays scripts on one server, and keeps what it answers.

    :param name: what its streams are called
    :param configs: whether configurations of consumers are compared
    """

    connection: Connection
    name: str
    configs: bool = False
    transcript: list[Any] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def level(self) -> int:
        """The level of JetStream's API."""
        return self.connection.api_level

    def note(self, what: str, answer: Any) -> None:
        """Keep an answer."""
        if what.startswith("STREAM.INFO") and what.partition(" ")[0].endswith(_COPIES) and "state" in answer:
            # Their sizes differ by the digits of times.
            answer = {**answer, "state": {**answer["state"], "bytes": 0}}
        left_out = _LEFT_OUT if self.configs and what.startswith("CONSUMER") else _LEFT_OUT | {"config"}
        if self.level < _SHOWS_STORED and not what.startswith(LATER):
            # The floor follows a timer of the ack wait.
            left_out = left_out | {"ack_floor"}
        self.transcript.append((what, self._renamed(answer, left_out)))

    def _renamed(self, answer: Any, left_out: AbstractSet[str]) -> Any:
        match answer:
            case dict():
                return {
                    key.replace(self.name, "q"): self._renamed(value, left_out)
                    for key, value in answer.items()
                    if key not in left_out
                }
            case list() | tuple():
                return [self._renamed(item, left_out) for item in answer]
            case str():
                return answer.replace(self.name, "q")
        return answer

    async def api(self, subject: str, request: object = None) -> dict[str, Any]:
        """Send a request to JetStream's API.

        :param request: JSON, or bytes as they are
        """
        payload = request if isinstance(request, bytes) else b"" if request is None else json.dumps(request).encode()
        try:
            subject = subject.replace("%", self.name)
            answer = json.loads(await self.connection.api_request(subject, payload, time_limit=_ANSWERED_WITHIN))
        except TransientError as error:
            answer = {"no answer": type(error).__name__}
        if answer.get("error", {}).get("err_code") == _INVALID_JSON:
            # Its text is that of the Go library.
            answer["error"].pop("description")
        shown = request if isinstance(request, bytes) else json.dumps(request, sort_keys=True)
        self.note(f"{subject} {shown!r}", answer)
        return dict(answer)

    async def publish(self, subject: str, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Publish a message that a stream answers."""
        block = Headers(list(headers))
        try:
            answer = await self.connection.publish_acknowledged(f"{self.name}.{subject}", body, block)
            self.note(f"publish {subject} {list(headers)}", json.loads(answer) if answer else "")
        except Exception as error:  # noqa: BLE001 - what comes of it is compared
            self.note(f"publish {subject} {list(headers)}", type(error).__name__)

    async def send(self, subject: str, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Publish a message whose answer nobody waits for."""
        await self.connection.publish(f"{self.name}.{subject}", body, Headers(list(headers)))

    async def pull(self, consumer: str, *requests: object, wait: float) -> None:
        """Send pull requests at once, and note what comes of each within some seconds."""
        found = await asyncio.gather(
            *[self._pull(consumer, request, wait, number * _AFTER) for number, request in enumerate(requests)]
        )
        self.note(f"pull {consumer} {requests!r}", found)

    async def _pull(self, consumer: str, request: object, wait: float, after: float) -> list[Any]:
        await asyncio.sleep(after)
        found: list[Any] = []
        ended = asyncio.Event()
        payload = request if isinstance(request, bytes) else json.dumps(request).encode()
        batch = int(payload) if payload.isdigit() else 1
        if isinstance(request, dict):
            batch = request.get("batch") or 1
        # Behind the last message comes how many bytes are left.
        has_end = isinstance(request, dict) and bool(request.get("max_bytes"))

        def receive(subject: bytes, reply: bytes, headers: bytes | None, body: bytes) -> None:
            if reply.startswith(b"$JS.ACK."):
                tokens = reply.decode().split(".")
                self.deliveries.append(Delivery(int(tokens[5]), reply.decode()))
                shown = [tokens[4], tokens[5], tokens[6], tokens[8], subject.decode(), _shown(headers), body.decode()]
            else:
                shown = [_shown(headers)]
                is_heartbeat = shown[0][0] == "100 Idle Heartbeat"
                if is_heartbeat and found and found[-1] == shown:
                    # How many come depends on how busy the machine is.
                    return
                if not is_heartbeat:
                    ended.set()
            found.append(shown)
            if not has_end and sum(len(message) > 1 for message in found) == batch:
                ended.set()

        inbox = self.connection.new_inbox()
        subscription = await self.connection.subscribe_raw(inbox, receive)
        try:
            subject = f"{self.connection.api_prefix}.CONSUMER.MSG.NEXT.{self.name}.{consumer}"
            await self.connection.publish(subject, payload, reply=inbox)
            try:
                async with asyncio.timeout(wait):
                    await ended.wait()
            except TimeoutError:
                found.append("no end")
        finally:
            await subscription.unsubscribe()
        return found

    async def answer(self, delivery: Delivery, body: bytes) -> None:
        """Send an answer to a delivery, and note whether the server confirms it."""
        try:
            answer = await self.connection.request(delivery.reply, body, time_limit=0.5)
            self.note(f"{body.decode()} {delivery.sequence}", answer.decode())
        except Exception as error:  # noqa: BLE001 - what comes of it is compared
            self.note(f"{body.decode()} {delivery.sequence}", type(error).__name__)

    async def get(self, request: dict[str, Any], stream: str = "") -> None:
        """Read a message with MSG.GET."""
        subject = f"STREAM.MSG.GET.{self.name}{stream}"
        answer = json.loads(await self.connection.api_request(subject, json.dumps(request).encode()))
        message = answer.get("message") or {}
        headers = _shown(base64.b64decode(message.get("hdrs") or b""))
        found = [message.get("subject"), message.get("seq"), headers, message.get("data"), answer.get("error")]
        self.note(f"get {request}", found)

    async def direct_get(self, request: dict[str, Any], last: str = "") -> None:
        """Read messages with a direct get.

        :param last: the subject whose last message is read, named in that of the request
        """
        found: list[Any] = []
        ended = asyncio.Event()
        is_batch = "batch" in request or "multi_last" in request

        def receive(_subject: bytes, _reply: bytes, headers: bytes | None, body: bytes) -> None:
            found.append([_shown(headers), body.decode()])
            if not is_batch or is_last_of_batch(headers or b""):
                ended.set()

        inbox = self.connection.new_inbox()
        subscription = await self.connection.subscribe_raw(inbox, receive)
        try:
            subject = f"{self.connection.api_prefix}.DIRECT.GET.{self.name}" + (f".{last}" if last else "")
            payload = json.dumps(request).encode() if request else b""
            self.connection.write(encode_message(encode_subject(subject), payload, b"", inbox.encode()))
            async with asyncio.timeout(_ANSWERED_WITHIN):
                await ended.wait()
        except TimeoutError:
            found.append("no end")
        finally:
            await subscription.unsubscribe()
        self.note(f"direct get {last} {request}", found)

    async def stored(self, stream: str) -> None:
        """Note what a stream stores."""
        info = json.loads(await self.connection.api_request(f"STREAM.INFO.{self.name}{stream}"))
        if "state" not in info:
            self.note(f"stored in {stream or 'the queue'}", info.get("error"))
            return
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
            found.sort(key=lambda message: json.dumps(self._renamed(message, _LEFT_OUT), sort_keys=True))
        self.note(f"stored in {stream or 'the queue'}", found)


def _shown(headers: bytes | None) -> Any:
    if not headers:
        return []
    status = headers[9:].partition(b"\r\n")[0].decode() if headers.startswith(b"NATS/1.0 ") else ""
    return [status, *[[name, str(value)] for name, value in parse_headers(headers) if name not in _HEADERS_LEFT_OUT]]


__all__ = ["DEAD", "LATER", "Delivery", "Player"]
