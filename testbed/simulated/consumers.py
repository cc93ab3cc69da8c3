"""Pull consumers of the simulated server: deliveries, their ends, and the advisories about them."""

from __future__ import annotations

import copy
import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.subjects import covers, overlaps
from testbed.simulated.streams import NANOSECONDS, Refusal, timestamp

if TYPE_CHECKING:
    import asyncio

    from testbed.simulated.streams import Message, Stream

_ACK_WAIT: Final = 30 * NANOSECONDS
_MAX_ACK_PENDING: Final = 1000
_MAX_WAITING: Final = 512
# The levels of JetStream's API from which on a server does so.
_ENDS_AT_ONCE: Final = 1
_SHOWS_STORED: Final = 1
_NOTES_DEAD: Final = 5
_ASKS_OTHERS: Final = 2
_KEEPS_SAMPLING: Final = 1
_DELETED: Final = "Unacknowledged message was deleted"
_FIXED: Final = {
    "deliver_policy": "deliver policy",
    "mem_storage": "storage type",
    "ack_policy": "ack policy",
    "max_waiting": "max waiting",
}
_STATE: Final = ("next", "number", "floor", "floor_number", "pending", "deliveries", "due", "stored")
_ADVISORY: Final = "$JS.EVENT.ADVISORY.CONSUMER"


@dataclass(slots=True)
class Pull:
    """A pull request that waits.

    :param left: how many messages it may still get
    :param served: whether it has got any
    :param no_wait: whether it ends where nothing is there
    """

    reply: str
    left: int
    max_bytes: int | None
    no_wait: bool
    heartbeat: int
    served: bool = False
    timer: asyncio.TimerHandle | None = None
    heart: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Pending:
    """A delivery without an end: its number, and when it was delivered."""

    number: int
    at: int


@dataclass(slots=True)
class StoredState:
    """What the server stores of a consumer, and shows of it once it has delivered something.

    It differs from what the consumer itself counts by: a message that was passed by isn't delivered.
    """

    number: int = 0
    sequence: int = 0
    floor_number: int = 0
    floor: int = 0
    pending: dict[int, int] = field(default_factory=dict)

    def deliver(self, number: int, sequence: int, count: int, most: int) -> None:
        """Store a delivery, or that a message has used up its deliveries.

        :param count: the number of deliveries of the message, this one included
        :param most: how many it may have
        """
        if number <= self.floor_number:
            return
        if sequence > self.sequence:
            self.pending[sequence] = number
        self.number, self.sequence = max(self.number, number), max(self.sequence, sequence)
        if 0 < most < count:
            self.pending.pop(sequence, None)

    def acknowledge(self, number: int, sequence: int) -> None:
        """Store the end of a delivery, and move the floor where it was the lowest."""
        if number <= self.floor_number or sequence not in self.pending:
            return
        number = min(number, self.pending.pop(sequence))
        if not self.pending:
            self.floor_number, self.floor = self.number, self.sequence
        elif number == self.floor_number + 1:
            self.floor_number, self.floor = number, sequence
            lowest = min((held for held in self.pending if held > sequence), default=None)
            if self.number > number and lowest is not None:
                self.floor_number, self.floor = self.pending[lowest] - 1, lowest - 1


@dataclass
class Consumer:
    """A pull consumer.

    :ivar next: the first sequence that it hasn't looked at
    :ivar number: how many deliveries there were
    :ivar deliveries: by sequence, how often a message was delivered again
    :ivar due: sequences to be delivered again, in order
    :ivar share: of how many percent of the acknowledgements there are metrics
    """

    stream: Stream[Consumer]
    config: dict[str, Any]
    created: int
    next: int = 1
    number: int = 0
    floor: int = 0
    floor_number: int = 0
    pending: dict[int, Pending] = field(default_factory=dict)
    deliveries: dict[int, int] = field(default_factory=dict)
    due: deque[int] = field(default_factory=deque)
    pulls: deque[Pull] = field(default_factory=deque)
    stored: StoredState = field(default_factory=StoredState)
    timer: asyncio.TimerHandle | None = None
    gone: bool = False
    cleared: int = 0
    share: int = field(init=False)

    def __post_init__(self) -> None:
        self.share = _percent(self.config.get("sample_freq"))

    @classmethod
    def create(cls, stream: Stream[Consumer], config: dict[str, Any]) -> Consumer:
        """Make a consumer that begins where its configuration says."""
        full = completed(stream, config)
        consumer = cls(stream, full, stream.now())
        policy = full["deliver_policy"]
        start = stream.first
        if policy == "new":
            start = stream.last + 1
        elif policy == "by_start_sequence":
            start = max(full.get("opt_start_seq") or 1, 1)
        elif policy == "last":
            start = max(stream.last, 1)
        consumer.next = max(1, start)
        consumer.floor = 0 if policy == "new" and consumer._level < _SHOWS_STORED else max(0, start - 1)
        if policy != "all" and consumer._level >= _NOTES_DEAD:
            consumer.stored.floor = consumer.floor
        return consumer

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.config.get("durable_name") or self.config["name"])

    @property
    def _level(self) -> int:
        return self.stream.server.level

    @property
    def filters(self) -> list[str]:
        """Its filter subjects."""
        filters = self.config.get("filter_subjects") or []
        return filters or [self.config.get("filter_subject") or ">"]

    @property
    def acknowledges(self) -> bool:
        """Whether what it delivers is to be acknowledged."""
        return bool(self.config["ack_policy"] != "none")

    @property
    def is_paused(self) -> bool:
        """Whether it delivers nothing for some time."""
        return self.paused_for > 0

    @property
    def paused_for(self) -> int:
        """For how many nanoseconds it is still paused."""
        until = self.config.get("pause_until")
        if not until:
            return 0
        return max(0, nanoseconds(until) - self.stream.now())

    def matches(self, subject: str) -> bool:
        """Return whether it takes messages of a subject."""
        return any(covers(filter_, subject) for filter_ in self.filters)

    # Deliveries.

    def pull(self, reply: str, body: bytes) -> None:
        """Serve a pull request, now or when something arrives."""
        server = self.stream.server
        if not server.has_interest(reply):
            return
        request = _parsed_pull(body)
        if request is None:
            self._status(reply, "400 Bad Request - unexpected end of JSON input")
            return
        if problem := self._pull_problem(request):
            self._status(reply, problem)
            return
        batch = request.get("batch") or 1
        expires, no_wait = request.get("expires") or 0, request.get("no_wait") or False
        pull = Pull(
            reply,
            batch,
            request.get("max_bytes") or None,
            no_wait=no_wait,
            heartbeat=request.get("idle_heartbeat") or 0,
        )
        if no_wait and (problem := self._no_wait_problem(expires)):
            self._status(reply, problem)
            return
        most = self.config.get("max_waiting") or _MAX_WAITING
        if len(self.pulls) >= most and server.now() - self.cleared > NANOSECONDS:
            # The server looks for abandoned ones no more often, whatever it looks at them for.
            self._drop_abandoned()
        if len(self.pulls) >= most:
            if not pull.heartbeat:
                self._status(reply, "409 Exceeded MaxWaiting")
            return
        self.pulls.append(pull)
        if expires:
            pull.timer = server.later(expires, lambda: self._end_pull(pull, "408 Request Timeout"))
        if pull.heartbeat:
            pull.heart = server.later(pull.heartbeat, lambda: self._beat(pull))
        self.serve()

    def _pull_problem(self, request: dict[str, Any]) -> str:
        """Return the status with which a pull request is refused; empty where it isn't."""
        config, expires = self.config, request.get("expires") or 0
        if (request.get("idle_heartbeat") or 0) * 2 > expires:
            return "400 Bad Request - heartbeat value too large"
        if (most := config.get("max_batch")) and (request.get("batch") or 1) > most:
            return f"409 Exceeded MaxRequestBatch of {most}"
        if (longest := config.get("max_expires")) and expires > longest:
            return f"409 Exceeded MaxRequestExpires of {longest // 10**6}ms"
        if (largest := config.get("max_bytes")) and (request.get("max_bytes") or 0) > largest:
            return f"409 Exceeded MaxRequestMaxBytes of {largest}"
        return ""

    def _no_wait_problem(self, expires: int) -> str:
        """Return the status that ends a request at once that doesn't wait; empty where it goes on."""
        pending = self.num_pending() + len(self.due)
        if not pending and not expires:
            return "404 No Messages"
        if pending:
            self._drop_abandoned()
        return "408 Requests Pending" if 0 < pending < sum(other.left for other in self.pulls) else ""

    def serve(self) -> None:
        """Deliver to the pull requests that wait what can be delivered."""
        while self.pulls and not self.is_paused and not self.gone:
            found = self._next()
            self._drop_abandoned()
            if found is None:
                if not self._is_full():
                    self._end_impatient()
                return
            if not self.pulls:
                self._put_back(found.sequence)
                return
            pull = self.pulls[0]
            if self._deliver_to(pull, found) and pull.left:
                # The server serves requests in turn.
                self.pulls.rotate(-1)

    def _drop_abandoned(self) -> None:
        """Drop the requests to whose answers nobody subscribes any more."""
        if self.pulls:
            self.cleared = self.stream.server.now()
        for pull in list(self.pulls):
            if not self.stream.server.has_interest(pull.reply):
                self._drop(pull)

    def _end_impatient(self) -> None:
        """End the requests that don't wait, but for those that have got nothing and have a time limit."""
        for pull in list(self.pulls):
            if self._level < _ENDS_AT_ONCE:
                if pull.no_wait and pull.served:
                    self._end_pull(pull, "408 Request Timeout")
            elif pull.no_wait and (pull.served or pull.timer is None):
                self._end_pull(pull, "404 No Messages")

    def _deliver_to(self, pull: Pull, message: Message) -> bool:
        """Deliver a message, or put it back where the request has no room for it."""
        headers, data = message.headers, message.data
        if self.config.get("headers_only"):
            headers, data = without_body(headers, data), b""
        size = len(message.subject) + len(self._ack_subject(message, self.number + 1)) + len(headers) + len(data)
        if pull.max_bytes is not None and size > pull.max_bytes:
            self._put_back(message.sequence)
            self._end_pull(pull, "409 Message Size Exceeds MaxBytes")
            return False
        pull.left -= 1
        if pull.max_bytes is not None:
            pull.max_bytes -= size
            pull.left = pull.left if pull.max_bytes else 0
        pull.served = True
        self._deliver(pull.reply, message, headers, data)
        if pull.left <= 0:
            if pull.max_bytes:
                extra = f"Nats-Pending-Messages: 0\r\nNats-Pending-Bytes: {pull.max_bytes}\r\n"
                self._status(pull.reply, "409 Batch Completed", extra)
            self._drop(pull)
        return True

    def _put_back(self, sequence: int) -> None:
        if not self.deliveries.get(sequence) and sequence == self.next - 1:
            self.next = sequence
        elif sequence not in self.due:
            self.deliveries[sequence] = self.deliveries.get(sequence, 0) - 1
            self.due.append(sequence)

    def _is_full(self) -> bool:
        most = self.config.get("max_ack_pending") or 0
        return self.acknowledges and 0 < most <= len(self.pending)

    def _next(self) -> Message | None:
        """Take the next message to deliver; those that have used up their deliveries are announced and passed by."""
        messages, most = self.stream.messages, self.config["max_deliver"]
        while self.due:
            sequence = self.due.popleft()
            self.deliveries[sequence] = self.deliveries.get(sequence, 0) + 1
            count = self.deliveries[sequence] + 1
            if 0 < most < count:
                if count == most + 1:
                    self._advise("MAX_DELIVERIES", "max_deliver", sequence, deliveries=count - 1)
                self._take_out(sequence, count)
                continue
            if message := messages.get(sequence):
                return message
            self.deliveries[sequence] -= 1
            if sequence in self.pending and self._level >= _ENDS_AT_ONCE:
                self._terminate(sequence, self.pending[sequence].number, count - 1, _DELETED)
        if self._is_full():
            return None
        for sequence, message in messages.items():
            if sequence >= self.next and self.matches(message.subject):
                self.next = sequence + 1
                return message
        self.next = max(self.next, self.stream.last + 1)
        return None

    def _ack_subject(self, message: Message, number: int) -> str:
        count = max(0, self.deliveries.get(message.sequence, 0)) + 1
        return (
            f"$JS.ACK.{self.stream.name}.{self.name}.{count}.{message.sequence}.{number}.{message.time}"
            f".{self.num_pending()}"
        )

    def _deliver(self, reply: str, message: Message, headers: bytes, data: bytes) -> None:
        server, sequence, now = self.stream.server, message.sequence, self.stream.now()
        self.number += 1
        count = max(0, self.deliveries.get(sequence, 0)) + 1
        if self.acknowledges:
            self.stored.deliver(self.number, sequence, count, self.config["max_deliver"])
            if sequence in self.pending:
                self.pending[sequence].at = now
            else:
                self.pending[sequence] = Pending(self.number, now)
            self._set_timer()
        else:
            self.floor, self.floor_number = sequence, self.number
            stored = self.stored
            stored.number = stored.floor_number = self.number
            stored.sequence = stored.floor = max(stored.sequence, sequence)
        ack = self._ack_subject(message, self.number)
        server.deliver(reply, headers, data, reply=ack, subject=message.subject)

    def _status(self, reply: str, text: str, extra: str = "") -> None:
        self.stream.server.deliver(reply, f"NATS/1.0 {text}\r\n{extra}\r\n".encode(), b"")

    def _end_pull(self, pull: Pull, text: str) -> None:
        if pull in self.pulls or pull.timer is None:
            size = "" if pull.max_bytes is None else str(pull.max_bytes)
            extra = f"Nats-Pending-Messages: {pull.left}\r\nNats-Pending-Bytes: {size or 0}\r\n"
            self._status(pull.reply, text, extra if not text.startswith("404") else "")
            self.cleared = self.stream.server.now()
        self._drop(pull)

    def _drop(self, pull: Pull) -> None:
        for timer in (pull.timer, pull.heart):
            if timer:
                timer.cancel()
        if pull in self.pulls:
            self.pulls.remove(pull)

    def _beat(self, pull: Pull) -> None:
        if pull in self.pulls:
            extra = f"Nats-Last-Consumer: {self.number}\r\nNats-Last-Stream: {self.next - 1}\r\n"
            self._status(pull.reply, "100 Idle Heartbeat", extra)
            pull.heart = self.stream.server.later(pull.heartbeat, lambda: self._beat(pull))

    # Ends of deliveries.

    def acknowledge(self, tokens: list[str], body: bytes, reply: str) -> None:
        """Serve what was sent to a ``$JS.ACK`` subject.

        :param tokens: number of the delivery, stream sequence and consumer sequence
        """
        count, sequence, number = int(tokens[0]), int(tokens[1]), int(tokens[2])
        kind, _, argument = body.partition(b" ")
        if kind in (b"", b"+ACK", b"+OK") or kind.startswith(b"{"):
            done = self._ack(sequence, number, count)
        elif kind == b"+NXT":
            done = self._ack(sequence, number, count)
            self.pull(reply, argument)
            reply = ""
        elif kind == b"-NAK":
            done = self._nak(sequence, count, number, argument)
        elif kind == b"+TERM":
            reason = argument.decode("utf-8", "replace").strip()
            self.stream.note_death(sequence)
            if sequence in self.pending and self.deliveries.get(sequence, 0) >= count:
                self.stream.server.on_late_termination(self.stream.messages[sequence])
            done = self._terminate(sequence, number, count, reason)
        elif kind == b"+WPI":
            done = True
            if pending := self.pending.get(sequence):
                pending.at = self.stream.now()
                self.stored.deliver(pending.number, sequence, 1, 0)
                self._set_timer()
        else:
            done = True
        if reply and done:
            self.stream.server.deliver(reply, b"", b"")

    def _ack(self, sequence: int, number: int, count: int, *, sampled: bool = True) -> bool:
        """Take an acknowledgement, and return whether it is confirmed."""
        if sequence >= self.next:
            return False
        if pending := self.pending.get(sequence):
            if sampled and self.share:
                self._sample(sequence, number, count, pending)
            del self.pending[sequence]
            number = pending.number
            self._move_floor(number, sequence)
        self.deliveries.pop(sequence, None)
        if sequence in self.due:
            self.due.remove(sequence)
        self.stored.acknowledge(number, sequence)
        if self.stream.is_work_queue:
            # Whoever acknowledges it, unless it is another consumer's to deliver or to have acknowledged.
            message = self.stream.messages.get(sequence)
            others = [other for other in self.stream.consumers.values() if other is not self]
            if message and not (self._level >= _ASKS_OTHERS and any(other.needs(message) for other in others)):
                self.stream.remove(sequence)
        self._set_timer()
        self.serve()
        return True

    def needs(self, message: Message) -> bool:
        """Return whether it is still to deliver a message, or to have it acknowledged."""
        sequence = message.sequence
        is_open = sequence >= self.next or sequence in self.pending
        return sequence > self.floor and is_open and self.matches(message.subject)

    def _sample(self, sequence: int, number: int, count: int, pending: Pending) -> None:
        now = self.stream.now()
        metric = self._event(
            "io.nats.jetstream.metric.v1.consumer_ack",
            sequence,
            consumer_seq=number,
            ack_time=now - pending.at,
            deliveries=count,
        )
        self.stream.server.publish(f"$JS.EVENT.METRIC.CONSUMER.ACK.{self.stream.name}.{self.name}", b"", metric)

    def _terminate(self, sequence: int, number: int, count: int, reason: str) -> bool:
        done = self._ack(sequence, number, count, sampled=False)
        fields = {"reason": reason} if reason else {}
        self._advise("MSG_TERMINATED", "terminated", sequence, consumer_seq=number, deliveries=count, **fields)
        return done

    def _move_floor(self, number: int, sequence: int) -> None:
        """Move the floor of what the consumer itself counts."""
        if not self.pending:
            self.floor_number, self.floor = self.number, self.next - 1
        elif number == self.floor_number + 1:
            self.floor_number, self.floor = number, sequence
            lowest = min((held for held in self.pending if held > sequence), default=None)
            if lowest is not None:
                self.floor_number, self.floor = self.pending[lowest].number - 1, lowest - 1

    def _nak(self, sequence: int, count: int, number: int, argument: bytes) -> bool:
        pending = self.pending.get(sequence)
        if pending is None or not self.floor_number < number <= self.number:
            return True
        self._advise("MSG_NAKED", "nak", sequence, consumer_seq=number, deliveries=count)
        delay = _nak_delay(argument)
        if delay is not None:
            if sequence in self.due:
                self.due.remove(sequence)
            # As the server does it: the delivery looks as if it had begun so that its ack wait ends after the delay.
            pending.at = self.stream.now() - self.config["ack_wait"] + delay
            self.stored.deliver(pending.number, sequence, count, self.config["max_deliver"])
            self._set_timer()
            return True
        if sequence not in self.due:
            self.due.append(sequence)
        self.serve()
        return True

    def forget(self, sequence: int) -> None:
        """Give up a message that was removed from the stream."""
        if pending := self.pending.get(sequence):
            self._terminate(sequence, pending.number, max(1, self.deliveries.get(sequence, 1)), _DELETED)
        elif self._level >= _NOTES_DEAD:
            self.deliveries.pop(sequence, None)

    def purge(self, first: int, last: int, *, wider: bool) -> None:
        """Pass by what was purged.

        :param first: the first sequence that is left of what the consumer takes, 0 where none is
        :param last: the stream's last sequence
        :param wider: whether the consumer takes more than was purged
        """
        if not first and not wider:
            first = last + 1
        self.next = max(self.next, first)
        if self.floor < first:
            self.floor = first - 1
            for sequence, pending in list(self.pending.items()):
                if sequence <= self.floor or (wider and sequence not in self.stream.messages):
                    self.floor_number = max(self.floor_number, pending.number)
                    self.number = max(self.number, self.floor_number)
                    del self.pending[sequence]
                    self.deliveries.pop(sequence, None)
                    if self._level >= _NOTES_DEAD:
                        self.stored.acknowledge(pending.number, sequence)
        if not self.pending:
            self.deliveries.clear()
            self.floor_number, self.floor = self.number, self.next - 1
        self.due = deque(sequence for sequence in self.due if sequence >= self.next)
        held = {sequence: pending.number for sequence, pending in self.pending.items()}
        self.stored = StoredState(self.number, self.next - 1, self.floor_number, self.floor, held)

    def _take_out(self, sequence: int, count: int) -> None:
        """Give up a message that has used up its deliveries; it stays in the stream."""
        self.stream.note_death(sequence)
        if pending := self.pending.pop(sequence, None):
            self.stored.deliver(pending.number, sequence, count, self.config["max_deliver"])
            if self._level >= _NOTES_DEAD or (not self.pending and self._level >= _SHOWS_STORED):
                self._move_floor(pending.number, sequence)

    # Time.

    def _wait(self, sequence: int) -> int:
        backoff = self.config.get("backoff") or ()
        if not backoff:
            return int(self.config["ack_wait"])
        return int(backoff[min(max(0, self.deliveries.get(sequence, 0)), len(backoff) - 1)])

    def _set_timer(self) -> None:
        if self.timer and not self.pending and self._level < _SHOWS_STORED:
            # It goes on, and moves the floor.
            return
        if self.timer:
            self.timer.cancel()
            self.timer = None
        ends = [
            pending.at + self._wait(sequence) for sequence, pending in self.pending.items() if sequence not in self.due
        ]
        if ends and not self.gone:
            self.timer = self.stream.server.later(max(0, min(ends) - self.stream.now()), self._check_pending)

    def _check_pending(self) -> None:
        now, most = self.stream.now(), self.config["max_deliver"]
        self.timer = None
        for sequence, pending in sorted(self.pending.items()):
            if sequence in self.due or pending.at + self._wait(sequence) > now:
                continue
            # The server compares redeliveries here, one less than deliveries; so the limit is mostly seen later.
            if 0 < most <= (count := max(1, self.deliveries.get(sequence, 1))):
                if count == most:
                    self._advise("MAX_DELIVERIES", "max_deliver", sequence, deliveries=count)
                self._take_out(sequence, count + 1 if self._level >= _NOTES_DEAD else count)
                self.deliveries[sequence] = count
                continue
            self.due.append(sequence)
        if not self.pending and self._level < _SHOWS_STORED:
            self.floor_number, self.floor = self.number, self.next - 1
        self._set_timer()
        self.serve()

    def update(self) -> None:
        """Follow a changed configuration; where it names no share of metrics, newer servers keep to the last one."""
        if (share := self.config.get("sample_freq")) or self._level < _KEEPS_SAMPLING:
            self.share = _percent(share)
        self._set_timer()
        self.serve()

    def end(self) -> None:
        """End the timers and the requests of a consumer that is deleted."""
        self.gone = True
        if self.timer:
            self.timer.cancel()
        for pull in list(self.pulls):
            self._end_pull(pull, "409 Consumer Deleted")

    @property
    def is_in_memory(self) -> bool:
        """Whether a restart of the server removes it."""
        return bool(self.config.get("mem_storage"))

    def copied(self) -> dict[str, Any]:
        """Return a copy of its state."""
        return copy.deepcopy({name: getattr(self, name) for name in _STATE})

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to an earlier state, as where the last moments weren't stored or replicated."""
        for name, value in copy.deepcopy(state).items():
            setattr(self, name, value)
        self.restart()
        self.serve()

    def restart(self) -> None:
        """Lose what waits, as with the server."""
        self.share = _percent(self.config.get("sample_freq"))
        for pull in list(self.pulls):
            self._drop(pull)
        self._set_timer()

    def reset(self, sequence: int) -> None:
        """Deliver every stored message from a sequence on anew."""
        self.next, self.floor = max(1, sequence), max(0, sequence - 1)
        self.number = self.floor_number = 0
        self.stored = StoredState(0, self.floor, 0, self.floor)
        self.pending.clear()
        self.deliveries.clear()
        self.due.clear()
        self._set_timer()
        self.serve()

    # What is shown.

    def num_pending(self) -> int:
        """Count the messages that were never delivered."""
        return sum(
            sequence >= self.next and self.matches(message.subject)
            for sequence, message in self.stream.messages.items()
        )

    def info(self) -> dict[str, Any]:
        """Return CONSUMER.INFO without its type."""
        stored = self.stored
        delivered, floor = (self.number, self.next - 1), (self.floor_number, self.floor)
        if self._level >= _SHOWS_STORED:
            delivered = (stored.number, stored.sequence) if stored.sequence else delivered
            floor = (stored.floor_number, stored.floor)
        self._drop_abandoned()
        answer: dict[str, Any] = {
            "stream_name": self.stream.name,
            "name": self.name,
            "created": timestamp(self.created),
            "config": self.config,
            "delivered": {"consumer_seq": delivered[0], "stream_seq": delivered[1]},
            "ack_floor": {"consumer_seq": floor[0], "stream_seq": floor[1]},
            "num_ack_pending": len(self.pending),
            "num_redelivered": self._redelivered(),
            "num_waiting": len(self.pulls),
            "num_pending": self.num_pending(),
            "ts": timestamp(self.stream.now()),
            **self.stream.cluster(),
        }
        if remaining := self.paused_for:
            answer |= {"paused": True, "pause_remaining": remaining}
        return answer

    def _redelivered(self) -> int:
        if self.config["max_deliver"] == 1 and self._level >= _SHOWS_STORED:
            return 0
        if self._level < _NOTES_DEAD:
            return len(self.deliveries)
        return sum(count > 0 for count in self.deliveries.values())

    def _advise(self, event: str, kind: str, sequence: int, **fields: Any) -> None:
        self.stream.server.publish(
            f"{_ADVISORY}.{event}.{self.stream.name}.{self.name}",
            b"",
            self._event(f"io.nats.jetstream.advisory.v1.{kind}", sequence, **fields),
        )

    def _event(self, kind: str, sequence: int, **fields: Any) -> bytes:
        server = self.stream.server
        event = {
            "type": kind,
            "id": server.new_id(),
            "timestamp": timestamp(self.stream.now()),
            "stream": self.stream.name,
            "consumer": self.name,
            "stream_seq": sequence,
            **fields,
        }
        return json.dumps(event, separators=(",", ":")).encode()


def completed(stream: Stream[Consumer], config: dict[str, Any]) -> dict[str, Any]:
    """Return a consumer's configuration as the server completes it.

    :raises Refusal: the stream takes no such consumer
    """
    full: dict[str, Any] = {
        "deliver_policy": "all",
        "ack_policy": "none",
        "replay_policy": "instant",
        "num_replicas": 0,
        "max_deliver": -1,
    } | {name: value for name, value in config.items() if value is not None}
    full["max_deliver"] = full["max_deliver"] or -1
    if backoff := full.get("backoff"):
        full["ack_wait"] = backoff[0]
    if full["ack_policy"] != "none":
        full["ack_wait"] = full.get("ack_wait") or _ACK_WAIT
        full["max_ack_pending"] = full.get("max_ack_pending") or _MAX_ACK_PENDING
    full["max_waiting"] = full.get("max_waiting") or _MAX_WAITING
    if full["max_deliver"] > 0 and len(full.get("backoff") or ()) > full["max_deliver"]:
        raise Refusal(400, 10116, "max deliver is required to be > length of backoff values")
    if full["ack_policy"] == "none" and stream.is_work_queue:
        old = stream.server.level < _ENDS_AT_ONCE
        kind = "ack policy" if old else "explicit ack policy on workqueue stream"
        raise Refusal(400, 10084, f"consumer in pull mode requires {kind}")
    filters = full.get("filter_subjects") or []
    if any(overlaps(one, other) for number, one in enumerate(filters) for other in filters[:number]):
        raise Refusal(400, 10138, "consumer subject filters cannot overlap")
    if (share := full.get("sample_freq")) and not share.rstrip("%").isdigit():
        text = f'strconv.Atoi: parsing "{share.rstrip("%")}": invalid syntax'
        raise Refusal(400, 10095, f"failed to parse consumer sampling configuration: {text}")
    return full


def check(stream: Stream[Consumer], full: dict[str, Any], existing: Consumer | None) -> None:
    """Refuse the configuration of a consumer that its stream or an earlier one doesn't allow.

    :raises Refusal: it does
    """
    for field_, shown in _FIXED.items() if existing else ():
        if existing and (full.get(field_) or "") != (existing.config.get(field_) or ""):
            raise Refusal(500, 10012, f"{shown} can not be updated")
    if stream.is_work_queue and full["deliver_policy"] != "all":
        raise Refusal(400, 10101, "consumer must be deliver all on workqueue stream")


def _nak_delay(argument: bytes) -> int | None:
    """Return the delay of a NAK; ``None`` where it has none that the server understands."""
    try:
        return int(json.loads(argument).get("delay") or 0) if argument.strip() else None
    except (ValueError, AttributeError):
        return None


def without_body(headers: bytes, data: bytes) -> bytes:
    """Return the headers of a message that is delivered without its body."""
    return (headers[:-2] if headers else b"NATS/1.0\r\n") + b"Nats-Msg-Size: %d\r\n\r\n" % len(data)


def _parsed_pull(body: bytes) -> dict[str, Any] | None:
    """Return a pull request; ``None`` where the server understands none."""
    if not body.strip() or body.strip().isdigit():
        return {"batch": int(body.strip() or 1)}
    try:
        request = json.loads(body)
    except ValueError:
        return None
    return request if isinstance(request, dict) else None


def nanoseconds(text: str) -> int:
    """Return the nanoseconds since 1970 of a server's text of a time."""
    from datetime import datetime

    whole, _, fraction = text.rstrip("Z").partition(".")
    digits = fraction.partition("+")[0][:9].ljust(9, "0") if fraction else "0"
    moment = datetime.fromisoformat(f"{whole}+00:00")
    return int(moment.timestamp()) * NANOSECONDS + int(digits)


def _percent(text: str | None) -> int:
    try:
        return int((text or "0").rstrip("%"))
    except ValueError:
        return 0
