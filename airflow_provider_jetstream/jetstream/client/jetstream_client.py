"""nats-py's client with some defects fixed and some features added.

Subjects and headers may be any bytes, a request may have many answers, whose headers stay as they are on the wire, and
nothing is sent over a later connection than the one for which it was meant. A denial reaches the request that it is
about. How the client connects is the subject of :mod:`.restoring_client`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nats import errors as nats_errors
from nats.aio.client import PING_PROTO

from airflow_provider_jetstream.jetstream.client.concurrency import keep_cancellation
from airflow_provider_jetstream.jetstream.client.denials import OpenRequests, error_kind, fail, parse_denial
from airflow_provider_jetstream.jetstream.client.direct_get import is_last_of_batch
from airflow_provider_jetstream.jetstream.client.headers import STATUS_LINE, encode_headers, first_values
from airflow_provider_jetstream.jetstream.client.parser_choice import RawHeaders, raw_callback
from airflow_provider_jetstream.jetstream.client.restoring_client import RestoringClient
from airflow_provider_jetstream.jetstream.client.transport import AbortableTransport
from airflow_provider_jetstream.jetstream.client.unsent import PING_SECONDS
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, encode_text
from airflow_provider_jetstream.jetstream.errors import SubscriptionRefusedError
from airflow_provider_jetstream.jetstream.limits import PUBLISHED_SUBJECT

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from airflow_provider_jetstream.jetstream.client.connection import OnMessage, RawMessage
    from airflow_provider_jetstream.jetstream.client.outage import RenewSettings
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.client.wire import FrameForm
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

log = logging.getLogger(__name__)

_SUBSCRIBE = b"SUB "


class JetStreamClient(RestoringClient):
    """A client whose requests end with the denial that is about them, and whose messages may hold any bytes.

    :param settings: servers, credentials and TLS
    :param renew: reads the settings again, where a lost connection can't be restored by the ones known
    """

    def __init__(self, settings: ConnectionSettings, renew: RenewSettings | None = None) -> None:
        super().__init__(settings, renew)
        self.open_requests = OpenRequests()
        # By inbox: what waits for the answer there, or for all of them.
        self._answers: dict[str, asyncio.Future[Any]] = {}
        # The subjects of subscriptions that the server hasn't taken yet, in their order.
        self._unconfirmed: list[tuple[str, asyncio.Future[bool]]] = []

    async def request_batch(self, subject: str, payload: bytes) -> list[RawMessage]:
        """Send a request and wait for all its answers, of which the last one has a status."""
        answers: list[RawMessage] = []
        ended = asyncio.get_running_loop().create_future()

        def collect(_subject: bytes, _reply: bytes, headers: bytes | None, body: bytes) -> None:
            answers.append((headers or b"", body))
            if not ended.done() and is_last_of_batch(headers or b""):
                ended.set_result(None)

        inbox = self.new_inbox()
        subscription = await self.subscribe_raw(inbox, collect)
        self._answers[inbox] = ended
        try:
            await self.publish(subject, payload, reply=inbox)
            await ended
            return answers
        finally:
            del self._answers[inbox]
            if self.parser:
                self.parser.raw_callbacks.pop(subscription._id, None)  # noqa: SLF001
            if self.is_connected:
                await subscription.unsubscribe()

    async def subscribe_raw(self, subject: str, on_message: OnMessage, form: FrameForm | None = None) -> Subscription:
        """Subscribe with a function that the parser calls at once, without a queue and a task for the messages."""
        if self.parser is None:
            return await self.subscribe(subject, cb=raw_callback(on_message))
        # The client counts its subscriptions, and a message may arrive before subscribe() returns.
        number = self._sid + 1
        self.parser.raw_callbacks[number] = on_message
        if form:
            form.bind(number)
            self.parser.forms[number] = form
        try:
            subscription = await self.subscribe(subject, cb=discard_message)
        except BaseException:
            self._remove_sub(number)
            raise
        return subscription

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        if self.parser:
            self.parser.raw_callbacks.pop(sid, None)
            self.parser.forms.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    def write(self, frames: bytes, messages: int) -> None:
        """Send encoded frames together with all else that is written before the event loop's next turn.

        :raises ConnectionReconnectingError: the connection is lost; nothing is sent, now or later
        :raises ConnectionClosedError: it is closed
        """
        if not self.is_connected:
            raise nats_errors.ConnectionClosedError if self.is_closed else nats_errors.ConnectionReconnectingError
        self._pending.append(frames)
        self._pending_data_size += len(frames)
        self.stats["out_msgs"] += messages
        self.stats["out_bytes"] += len(frames)
        if self._flush_queue is not None and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:  # noqa: FBT001, FBT002
        # nats-py waits here for ten seconds once much is written, within any request and whatever its time limit is.
        if cmd.startswith(_SUBSCRIBE):
            cmd = self._with_confirmation(cmd)
        self._pending.insert(0, cmd) if priority else self._pending.append(cmd)
        self._pending_data_size += len(cmd)

    def _with_confirmation(self, subscribe: bytes) -> bytes:
        """Let a ping follow a subscription: the server reads in order, so a refusal comes before its answer.

        The report of a refusal names no subscription: it is about the oldest that isn't confirmed.
        """
        confirmed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pongs.append(confirmed)
        self._unconfirmed = [entry for entry in self._unconfirmed if not entry[1].done()]
        self._unconfirmed.append((decode_text(subscribe.split(b" ")[1]), confirmed))
        return subscribe + PING_PROTO

    async def _attempt_reconnect(self) -> None:
        self._unconfirmed = []
        await super()._attempt_reconnect()

    async def wait_for_room(self) -> None:
        """Wait while more is written than nats-py holds, though not longer than for one request."""
        if self._pending_data_size <= self._max_pending_size or not self.is_connected or self._flush_queue is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.timeout):
                flushed = asyncio.get_running_loop().create_future()
                await self._flush_queue.put(flushed)
                await flushed

    async def drop_unsent(self) -> None:
        """Make sure that nothing that was sent so far reaches the server later.

        The server reads in order: once it has answered a ping, nothing that was sent before is on its way. A connection
        on which no such answer comes in time is aborted and restored.
        """
        if not self.is_connected:
            return
        transport = self._transport
        generation = transport.generation if isinstance(transport, AbortableTransport) else 0
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # Not by flush(), which sends its ping before what is buffered, and whose late answer ends the client's reading.
        self._pongs.append(pong)
        await self._send_command(PING_PROTO)
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()
        await asyncio.wait([pong], timeout=PING_SECONDS)
        if pong.done() or not self.is_connected or not isinstance(transport, AbortableTransport):
            return
        if transport.generation == generation:
            log.warning("The server hasn't answered for too long: the connection is dropped with what isn't sent")
            await self._process_op_err(nats_errors.StaleConnectionError())

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send a message.

        :raises ConnectionReconnectingError: the connection is lost; nothing is sent, now or later
        """
        if not self.is_connected:
            # A loop that tries again at once, such as one around nats-py's fetch, would hold the event loop, which then
            # neither restores the connection nor cancels anything.
            await asyncio.sleep(0)
            if not (self.is_connected or self.is_closed):
                raise nats_errors.ConnectionReconnectingError
        if reply and (answer := self._answer_on(reply)):
            self.open_requests.add(subject, answer)
        await super().publish(subject, payload, reply=reply, headers=headers)

    def _answer_on(self, reply: str) -> asyncio.Future[Any] | None:
        prefix = self._resp_sub_prefix
        if prefix and reply.startswith(prefix.decode()):
            return self._resp_map.get(reply[len(prefix) :])
        return self._answers.get(reply)

    async def _request_new_style(
        self,
        subject: str,
        payload: bytes,
        timeout: float = 1,  # noqa: ASYNC109
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        return await keep_cancellation(super()._request_new_style(subject, payload, timeout, headers))

    async def _request_old_style(self, subject: str, payload: bytes, timeout: float = 1) -> Msg:  # noqa: ASYNC109
        # As the client does it, except that a denial ends it.
        inbox, answer = self.new_inbox(), asyncio.get_running_loop().create_future()
        self._answers[inbox] = answer
        subscription: Subscription | None = None
        try:
            subscription = await self.subscribe(inbox, future=answer, max_msgs=1)
            await subscription.unsubscribe(limit=1)
            await self.publish(subject, payload, reply=inbox)
            async with asyncio.timeout(timeout):
                message: Msg = await answer
        except TimeoutError:
            if subscription and self.is_connected:
                await subscription.unsubscribe()
            raise nats_errors.TimeoutError from None
        finally:
            del self._answers[inbox]
        return message

    async def _process_err(self, err_msg: str) -> None:
        """Handle a report of the server; nats-py's own handling closes the connection for good."""
        text = err_msg.strip().strip("'")
        if denial := parse_denial(text, self.settings.client):
            await self._error_cb(denial)
            self._deny(denial)
            return
        kind = error_kind(text)
        if kind == "subscription" and (subject := self._take_unconfirmed()) is not None:
            refusal = SubscriptionRefusedError(subject, self.settings.client, text)
            await self._error_cb(refusal)
            self._deny(refusal)
            return
        error = nats_errors.StaleConnectionError() if text.lower() == "stale connection" else nats_errors.Error(text)
        self._err = error
        await self._error_cb(error)
        if kind == "subscription":
            # One of those that are sent again after a loss, nobody knows which: it would stay silent.
            self.close_reason = SubscriptionRefusedError("what it had subscribed to", self.settings.client, text)
            self._server_pool.clear()
        if kind != "permission":
            self.last_words = error
            await self._process_op_err(error)

    def _take_unconfirmed(self) -> str | None:
        """Return the subject of the oldest subscription that isn't confirmed, which the server refuses."""
        for entry in self._unconfirmed:
            if not entry[1].done():
                self._unconfirmed.remove(entry)
                return entry[0]
        return None

    def _deny(self, denial: PermissionDeniedError) -> None:
        self.open_requests.deny(denial)
        if denial.action == "publish":
            return
        purpose = "on which answers would arrive"
        if answer := self._answers.get(denial.subject):
            fail(answer, denial, purpose)
        prefix = self._resp_sub_prefix
        if prefix and denial.subject == f"{prefix.decode()}*":
            # The next request subscribes again: the permissions may have changed by then.
            self._resp_sub_prefix = None
            for number, subscription in list(self._subs.items()):
                if subscription.subject == denial.subject:
                    self._remove_sub(number)
                    # The client would never end the task that waits for its messages.
                    subscription._stop_processing()  # noqa: SLF001
            for answer in list(self._resp_map.values()):
                fail(answer, denial, purpose)

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        parsed = await self._parsed_headers(headers)
        # Without this package's parser, the raw ones are needed as well.
        return RawHeaders(headers, parsed or {}) if headers and self.parser is None else parsed

    async def _parsed_headers(self, headers: bytes) -> dict[str, str] | None:
        if headers and not headers.startswith(STATUS_LINE):
            # The client takes the last value of a name and a line that continues another for a header of its own. All
            # parts have to read the same, or a job would have two ids.
            return first_values(headers) or None
        try:
            return await super()._process_headers(headers)
        except (UnicodeDecodeError, IndexError) as error:
            # A publisher may send anything as headers, and the client would receive nothing more.
            log.warning("The headers of a message can't be parsed, and are ignored: %s", error)
            return None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        # The client decodes strictly: it would receive nothing more after a subject that isn't UTF-8.
        return self.msg_class(
            subject=decode_text(subject),
            reply=decode_text(reply),
            data=data,
            headers=headers,
            _client=self,
            _sid=sid,
        )

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: dict[str, str] | None
    ) -> None:
        # The client sends only UTF-8, and not every name of a header that may be stored.
        target, block = encode_text(subject), b"" if headers is None else encode_headers(headers)
        if len(target) + len(reply) > PUBLISHED_SUBJECT:
            # The server closes the connection that sends a longer line.
            raise nats_errors.BadSubjectError
        if len(block) + len(payload) > self.max_payload:
            # The client counts the body alone, and the server closes the connection.
            raise nats_errors.MaxPayloadError
        command = encode_message(target, payload, block, encode_text(reply))
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        await self._send_command(command)
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()


async def discard_message(_: Msg) -> None:
    """Do nothing with a message."""
