"""The simulated server: subjects and subscriptions, JetStream's API, and its restarts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.subjects import covers, overlaps
from testbed.simulated.consumers import Consumer, check, completed, nanoseconds
from testbed.simulated.loop import simulated_loop
from testbed.simulated.streams import NANOSECONDS, Refusal, Stream, compact, header, timestamp

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from testbed.simulated.streams import Message

API: Final = "$JS.API."
_ACK: Final = "$JS.ACK."
_TYPES: Final = {
    "INFO": "account_info",
    "STREAM.INFO": "stream_info",
    "STREAM.CREATE": "stream_create",
    "STREAM.UPDATE": "stream_update",
    "STREAM.DELETE": "stream_delete",
    "STREAM.NAMES": "stream_names",
    "STREAM.LIST": "stream_list",
    "STREAM.PURGE": "stream_purge",
    "STREAM.MSG.GET": "stream_msg_get",
    "STREAM.MSG.DELETE": "stream_msg_delete",
    "CONSUMER.INFO": "consumer_info",
    "CONSUMER.CREATE": "consumer_create",
    "CONSUMER.DURABLE": "consumer_create",
    "CONSUMER.DELETE": "consumer_delete",
    "CONSUMER.NAMES": "consumer_names",
    "CONSUMER.LIST": "consumer_list",
    "CONSUMER.PAUSE": "consumer_pause",
    "CONSUMER.RESET": "consumer_reset",
}
# The levels of JetStream's API by version.
_LEVELS: Final = {(2, 10): 0, (2, 11): 1, (2, 12): 2, (2, 14): 4, (2, 15): 5}
_PAGE: Final = 256
_PAUSE_LEVEL: Final = 1
_RESET_LEVEL: Final = 4
_NAMES_SUBJECTS: Final = 2


@dataclass(slots=True, eq=False)
class Listener:
    """A subscription: it gets subject, reply, headers and body of messages, in order."""

    subject: str
    receive: Callable[[str, str, bytes, bytes], None]


class Listeners:
    """The subscriptions of a server, found by the first two tokens of a subject."""

    def __init__(self) -> None:
        self._found: dict[str, list[Listener]] = {}

    def add(self, listener: Listener) -> None:
        """Add a subscription, unless it is there."""
        own = self._found.setdefault(_group(listener.subject), [])
        if listener not in own:
            own.append(listener)

    def remove(self, listener: Listener) -> None:
        """Remove a subscription, if it is there."""
        group = _group(listener.subject)
        own = self._found.get(group, [])
        if listener in own:
            own.remove(listener)
        if not own:
            self._found.pop(group, None)

    def clear(self) -> None:
        """Remove all."""
        self._found.clear()

    def of(self, subject: str) -> list[Listener]:
        """Return those to a subject."""
        groups = (self._found.get(_group(subject)), self._found.get(""))
        return [listener for group in groups for listener in group or () if covers(listener.subject, subject)]


def _group(subject: str) -> str:
    """Return what subscriptions are grouped by; empty where it holds a wildcard."""
    group = ".".join(subject.split(".", 2)[:2])
    return "" if "*" in group or ">" in group else group


class SimulatedServer:
    """One server with JetStream, in memory.

    :param version: whose behaviour it has
    :param clocks: of a cluster by how many nanoseconds each server's clock is ahead; each stream has one as its leader
    """

    def __init__(
        self, version: tuple[int, int, int] = (2, 15, 0), clocks: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self.version, self.clocks = version, clocks
        self.level = _LEVELS[version[:2]]
        self.loop = simulated_loop()
        self.streams: dict[str, Stream[Consumer]] = {}
        self.listeners = Listeners()
        self.is_up = True
        self.on_reset: Callable[[Consumer, list[int]], None] = lambda _consumer, _sequences: None
        self.on_late_termination: Callable[[Message], None] = lambda _: None
        self.on_update: Callable[[Consumer], None] = lambda _: None
        self._ids = 0

    # What streams and consumers need.

    def now(self) -> int:
        """Return the nanoseconds since 1970."""
        return self.loop.simulated_time.now()

    def new_id(self) -> str:
        """Return the id of an event."""
        self._ids += 1
        return f"{self._ids:022d}"

    def later(self, delay: int, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Call a function after some nanoseconds."""
        return self.loop.call_later(delay / NANOSECONDS, call)

    def has_interest(self, subject: str) -> bool:
        """Return whether somebody subscribes to a subject."""
        return bool(self.listeners.of(subject))

    def deliver(self, target: str, headers: bytes, data: bytes, *, reply: str = "", subject: str = "") -> bool:
        """Send a message to the subscriptions of a subject, and to nobody else.

        :param target: the subject by which subscriptions are found
        :param subject: the one that they are shown, where that is another
        :return: whether there is any
        """
        found = self.listeners.of(target)
        for listener in found:
            listener.receive(subject or target, reply, headers, data)
        return bool(found)

    # What clients send.

    def receive(self, subject: str, reply: str, headers: bytes, data: bytes) -> None:
        """Take a message that a client has published."""
        if not self.is_up or not self._is_led(subject):
            return
        if subject.startswith(API):
            self._answer(subject.removeprefix(API), reply, data)
        elif subject.startswith(_ACK):
            self._acknowledge(subject, reply, data)
        elif not self.publish(subject, headers, data, reply) and reply:
            self._say_that_nobody_answers(subject, reply)

    def _is_led(self, subject: str) -> bool:
        """Return whether the stream of a request or an acknowledgement has a leader."""
        if not subject.startswith((API, _ACK)):
            return True
        return all(
            stream.led for stream in self.streams.values() if not stream.led and stream.name in subject.split(".")
        )

    def publish(self, subject: str, headers: bytes, data: bytes, reply: str = "") -> bool:
        """Hand a message to subscriptions and streams; return whether there are any."""
        heard = self.deliver(subject, headers, data, reply=reply)
        for stream in list(self.streams.values()):
            if stream.captures(subject):
                heard = True
                if not stream.led:
                    continue
                try:
                    ack: dict[str, Any] = stream.publish(subject, headers, data)
                except Refusal as refusal:
                    ack = {"error": refusal.fields, "stream": stream.name, "seq": 0}
                if reply and not stream.config.get("no_ack"):
                    self.deliver(reply, b"", compact(ack))
        return heard

    def _acknowledge(self, subject: str, reply: str, data: bytes) -> None:
        stream, consumer, *tokens = subject.removeprefix(_ACK).split(".")
        found = self.streams[stream].consumers.get(consumer) if stream in self.streams else None
        if found:
            found.acknowledge(tokens, data, reply)
        elif reply:
            self._say_that_nobody_answers(subject, reply)

    def _say_that_nobody_answers(self, subject: str, reply: str) -> None:
        named = f"Nats-Subject: {subject}\r\n" if self.level >= _NAMES_SUBJECTS else ""
        self.deliver(reply, f"NATS/1.0 503\r\n{named}\r\n".encode("utf-8", "surrogateescape"), b"")

    # JetStream's API.

    def _answer(self, action: str, reply: str, data: bytes) -> None:
        if action.startswith("CONSUMER.MSG.NEXT."):
            stream, consumer = action.removeprefix("CONSUMER.MSG.NEXT.").split(".")
            found = self.streams[stream].consumers.get(consumer) if stream in self.streams else None
            if found:
                found.pull(reply, data)
            else:
                self._say_that_nobody_answers(f"{API}{action}", reply)
            return
        if action.startswith("DIRECT.GET."):
            self._direct_get(action.removeprefix("DIRECT.GET."), reply, data)
            return
        tokens = action.split(".", 3)
        kind = next((name for length in (3, 2, 1) if (name := ".".join(tokens[:length])) in _TYPES), "")
        if not kind:
            self._say_that_nobody_answers(f"{API}{action}", reply)
            return
        answer: dict[str, Any] = {"type": f"io.nats.jetstream.api.v1.{_TYPES[kind]}_response"}
        try:
            request = json.loads(data) if data.strip() else {}
            result = self._called(kind, action.removeprefix(kind).removeprefix("."), request)
            if result is None:
                return
            answer |= result
        except Refusal as refusal:
            answer["error"] = refusal.fields
            if kind == "STREAM.PURGE":
                answer["purged"] = 0
        except ValueError:
            answer["error"] = Refusal(400, 10025, "invalid JSON").fields
        if reply:
            self.deliver(reply, b"", compact(answer))

    def _called(self, kind: str, name: str, request: dict[str, Any]) -> dict[str, Any] | None:
        subject, _, what = kind.partition(".")
        if subject == "INFO":
            return {"memory": 0, "storage": 0, "streams": len(self.streams), "api": {"level": self.level}}
        stream, _, consumer = name.partition(".")
        if subject == "STREAM":
            return self._called_for_stream(what, stream, request)
        return self._called_for_consumer(what, self._stream(stream), consumer, request)

    def _stream(self, name: str) -> Stream[Consumer]:
        if name not in self.streams:
            raise Refusal(404, 10059, "stream not found")
        return self.streams[name]

    def _called_for_stream(self, what: str, name: str, request: dict[str, Any]) -> dict[str, Any]:  # noqa: C901, PLR0911 - a case for each
        if what == "CREATE":
            return self._create_stream(name, request)
        if what in ("NAMES", "LIST"):
            return self._listed(what, request)
        stream = self._stream(name)
        match what:
            case "UPDATE":
                return self._update_stream(stream, request)
            case "INFO":
                return stream.info(request)
            case "DELETE":
                for consumer in stream.consumers.values():
                    consumer.end()
                del self.streams[name]
                return {"success": True}
            case "PURGE":
                return {"success": True, "purged": stream.purge(request)}
            case "MSG.GET" if request:
                return {"message": _shown(stream.get(request))}
        if not request:
            raise Refusal(400, 10003, "bad request")
        if stream.config.get("deny_delete"):
            raise Refusal(500, 10057, "message delete not permitted")
        if not stream.remove(request.get("seq") or 0):
            raise Refusal(400, 10043, f"sequence {request.get('seq') or 0} not found")
        return {"success": True}

    def _create_stream(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("name") != name:
            raise Refusal(400, 10056, "stream name in subject does not match request")
        if existing := self.streams.get(name):
            if Stream.create(self, request).config != existing.config:
                raise Refusal(400, 10058, "stream name already in use with a different configuration")
            return {**existing.info(), "did_create": True}
        request = request if request.get("subjects") or request.get("sources") else {**request, "subjects": [name]}
        if any("" in subject.split(".") for subject in request.get("subjects") or ()):
            raise Refusal(500, 10052, "invalid subject")
        self._check_subjects(name, request)
        stream: Stream[Consumer] = Stream.create(self, request)
        if self.clocks:
            leader = self.loop.draws.of("leader", name).choice(sorted(self.clocks))
            stream.ahead = self.clocks[leader]
            stream.leader, stream.created = (leader, stream.now()), stream.now()
        self.streams[name] = stream
        return {**stream.info(), "did_create": True}

    def _check_subjects(self, name: str, request: dict[str, Any]) -> None:
        for other in self.streams.values():
            if other.name != name and any(
                overlaps(own, theirs) for own in request.get("subjects") or () for theirs in other.config["subjects"]
            ):
                raise Refusal(400, 10065, "subjects overlap with an existing stream")

    def _update_stream(self, stream: Stream[Consumer], request: dict[str, Any]) -> dict[str, Any]:
        self._check_subjects(stream.name, request)
        config = Stream.create(self, request).config
        for name in ("retention", "storage"):
            if config[name] != stream.config[name]:
                raise Refusal(500, 10052, f"stream configuration update can not change {name}")
        for name in ("deny_delete", "deny_purge"):
            if stream.config[name] and not config[name]:
                raise Refusal(500, 10052, f"stream configuration update can not cancel {name.replace('_', ' ')}")
        stream.config = config
        return stream.info()

    def _listed(self, what: str, request: dict[str, Any]) -> dict[str, Any]:
        filter_, offset = request.get("subject"), request.get("offset") or 0
        found = [
            stream
            for _, stream in sorted(self.streams.items())
            if not filter_ or any(overlaps(filter_, subject) for subject in stream.config.get("subjects") or ())
        ]
        page = found[offset : offset + _PAGE]
        streams: list[Any] = [stream.name for stream in page] if what == "NAMES" else [item.info() for item in page]
        return {"total": len(found), "offset": offset, "limit": _PAGE, "streams": streams or None}

    def _called_for_consumer(  # noqa: PLR0911 - a case for each
        self, what: str, stream: Stream[Consumer], name: str, request: dict[str, Any]
    ) -> dict[str, Any] | None:
        if what in ("CREATE", "DURABLE"):
            return self._create_consumer(stream, name, request)
        if what in ("NAMES", "LIST"):
            offset, all_consumers = request.get("offset") or 0, sorted(stream.consumers.items())
            page = all_consumers[offset : offset + _PAGE]
            consumers = [name for name, _ in page] if what == "NAMES" else [found.info() for _, found in page]
            return {"total": len(all_consumers), "offset": offset, "limit": _PAGE, "consumers": consumers}
        consumer = stream.consumers.get(name)
        if consumer is None:
            # A malformed subject and a reset of what doesn't exist have no answer.
            if what == "RESET":
                return None
            raise Refusal(404, 10014, "consumer not found")
        match what:
            case "INFO":
                return consumer.info()
            case "DELETE":
                consumer.end()
                del stream.consumers[name]
                return {"success": True}
            case "PAUSE" if self.level >= _PAUSE_LEVEL:
                return self._pause(consumer, request)
            case "RESET" if self.level >= _RESET_LEVEL:
                start = request.get("seq") or consumer.floor + 1
                again = [job for job in stream.messages if start <= job < consumer.next]
                self.on_reset(consumer, [job for job in again if consumer.matches(stream.messages[job].subject)])
                consumer.reset(start)
                return {**consumer.info(), "reset_seq": consumer.next}
        return None

    def _create_consumer(self, stream: Stream[Consumer], name: str, request: dict[str, Any]) -> dict[str, Any]:
        config, action = request.get("config") or {}, request.get("action") or ""
        if request.get("stream_name") not in (None, stream.name):
            raise Refusal(400, 10056, "stream name in subject does not match request")
        if name and config.get("durable_name") not in (None, "", name.partition(".")[0]):
            raise Refusal(400, 10017, "consumer name in subject does not match durable name in request")
        # The filter may stand in the subject, too.
        name = config.get("durable_name") or config.get("name") or name.partition(".")[0]
        existing = stream.consumers.get(name)
        full = completed(stream, {"name": name, **config})
        if existing and action == "create" and full != existing.config:
            raise Refusal(400, 10148, "consumer already exists")
        if not existing and action == "update":
            raise Refusal(400, 10149, "consumer does not exist")
        if stream.is_work_queue:
            if full["ack_policy"] == "all":
                raise Refusal(400, 10098, "workqueue stream requires explicit ack")
            self._check_filters(stream, Consumer(stream, full, self.now()), is_new=not existing)
        check(stream, full, existing)
        if existing:
            existing.config = full
            self.on_update(existing)
            existing.update()
            return existing.info()
        stream.consumers[name] = consumer = Consumer.create(stream, {"name": name, **config})
        return consumer.info()

    def _check_filters(self, stream: Stream[Consumer], new: Consumer, *, is_new: bool) -> None:
        """Refuse a consumer of a work queue that would take what another one takes."""
        others = [other for other in stream.consumers.values() if other.name != new.name]
        if others and new.filters == [">"]:
            if is_new:
                raise Refusal(400, 10099, "multiple non-filtered consumers not allowed on workqueue stream")
            return
        if any(overlaps(own, theirs) for other in others for own in new.filters for theirs in other.filters):
            raise Refusal(400, 10100, "filtered consumer not unique on workqueue stream")

    def _pause(self, consumer: Consumer, request: dict[str, Any]) -> dict[str, Any]:
        until = request.get("pause_until")
        if until and nanoseconds(until) > consumer.stream.now():
            consumer.config = {**consumer.config, "pause_until": until}
            self.later(consumer.paused_for, consumer.serve)
            return {"paused": True, "pause_until": until, "pause_remaining": consumer.paused_for}
        consumer.config = {name: value for name, value in consumer.config.items() if name != "pause_until"}
        consumer.serve()
        return {"paused": False, "pause_until": until or "0001-01-01T00:00:00Z"}

    def _direct_get(self, name: str, reply: str, data: bytes) -> None:
        name, _, last = name.partition(".")
        stream = self.streams.get(name)
        if stream is None or not stream.config.get("allow_direct"):
            self._say_that_nobody_answers(f"{API}DIRECT.GET.{name}{'.' + last if last else ''}", reply)
            return
        request = json.loads(data) if data.strip() else {}
        if last:
            request["last_by_subj"] = last
        if "batch" in request or "multi_last" in request:
            self._direct_batch(stream, reply, request)
            return
        try:
            message = stream.get(request)
        except Refusal:
            self.deliver(reply, b"NATS/1.0 404 Message Not Found\r\n\r\n", b"")
            return
        self.deliver(reply, _direct_headers(stream, message), message.data)

    def _direct_batch(self, stream: Stream[Consumer], reply: str, request: dict[str, Any]) -> None:
        if filters := request.get("multi_last"):
            wanted = [filters] if isinstance(filters, str) else filters
            subjects = {message.subject for message in stream.messages.values()}
            found = [stream.last_of(subject) for subject in subjects if any(covers(item, subject) for item in wanted)]
            messages = sorted((message for message in found if message), key=lambda message: message.sequence)
        else:
            start = request.get("seq") or 1
            messages = [item for item in stream.matching(request.get("next_by_subj") or ">") if item.sequence >= start]
        if not messages:
            text = "No Results" if filters else "Message Not Found"
            self.deliver(reply, f"NATS/1.0 404 {text}\r\n\r\n".encode(), b"")
            return
        size = sent = last = 0
        for message in messages[: request.get("batch") or None]:
            sent += 1
            extra = f"Nats-Num-Pending: {len(messages) - sent}\r\nNats-Last-Sequence: {last}\r\n"
            self.deliver(reply, _direct_headers(stream, message, extra), message.data)
            last = message.sequence
            size += len(message.subject) + len(message.headers) + len(message.data)
            if size >= (request.get("max_bytes") or size + 1):
                break
        text = f"Nats-Num-Pending: {len(messages) - sent}\r\nNats-Last-Sequence: {last}\r\n"
        self.deliver(reply, f"NATS/1.0 204 EOB\r\n{text}\r\n".encode(), b"")

    # Faults.

    def kill(self) -> None:
        """Stop at once: what isn't stored is gone, and clients lose their connections."""
        self.is_up = False
        self.listeners.clear()

    def start(self) -> None:
        """Run again with what was stored."""
        self.is_up = True
        for stream in self.streams.values():
            stream.restart()


def _shown(message: Any) -> dict[str, Any]:
    import base64

    shown = {"subject": message.subject, "seq": message.sequence}
    if message.headers:
        shown["hdrs"] = base64.b64encode(message.headers).decode()
    if message.data:
        shown["data"] = base64.b64encode(message.data).decode()
    return {**shown, "time": timestamp(message.time)}


def _direct_headers(stream: Stream[Consumer], message: Any, more: str = "") -> bytes:
    extra = (
        f"Nats-Stream: {stream.name}\r\nNats-Subject: {message.subject}\r\nNats-Sequence: {message.sequence}\r\n"
        f"Nats-Time-Stamp: {timestamp(message.time)}\r\n{more}\r\n"
    ).encode("utf-8", "surrogateescape")
    return (message.headers[:-2] if message.headers else b"NATS/1.0\r\n") + extra


__all__ = ["API", "Listener", "SimulatedServer", "header"]
