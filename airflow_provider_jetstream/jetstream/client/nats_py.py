"""The NATS client with two things mended and one added.

Credentials never leave in plaintext, a failed TLS handshake ends, and a request may have many answers, whose headers
come as they are on the wire.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nats.aio.client import Client

from airflow_provider_jetstream.jetstream.errors import TLSError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg


class JetStreamClient(Client):
    """A client that sends its credentials only over TLS where TLS was asked for.

    nats-py connects in plaintext to a server that doesn't announce TLS, even for ``tls://`` addresses. The CONNECT
    line carries the credentials, so this is the last place to stop it, at the first connection and at every later one.

    :param encrypted: refuse plaintext
    """

    def __init__(self, *, encrypted: bool) -> None:
        super().__init__()
        self._encrypted = encrypted
        self._takers: dict[int, Callable[[bytes, bytes], None]] = {}

    async def answers(self, subject: str, payload: bytes, ends: Callable[[bytes], bool]) -> list[tuple[bytes, bytes]]:
        """Send a request, and wait for all its answers.

        :param subject: the full subject
        :param payload: the body
        :param ends: tells by its headers whether an answer is the last one
        :return: headers and body of each answer, the last one included
        """

        async def ignore(_: Msg) -> None:
            return

        found: list[tuple[bytes, bytes]] = []
        ended = asyncio.get_running_loop().create_future()

        def take(headers: bytes, body: bytes) -> None:
            found.append((headers, body))
            if not ended.done() and ends(headers):
                ended.set_result(None)

        inbox = self.new_inbox()
        arrivals = await self.subscribe(inbox, cb=ignore)
        number = next(number for number, each in self._subs.items() if each is arrivals)
        self._takers[number] = take
        try:
            await self.publish(subject, payload, reply=inbox)
            await ended
            return found
        finally:
            del self._takers[number]
            if self.is_connected:
                await arrivals.unsubscribe()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        # The client's own way makes a dictionary of the headers, which forgets repeats.
        if take := self._takers.get(sid):
            take(bytes(headers or b""), bytes(data))
        else:
            await super()._process_msg(sid, subject, reply, data, headers)

    def _connect_command(self) -> bytes:
        if self._encrypted and not self._server_info.get("tls_required"):
            raise TLSError(
                "expected a server that requires TLS, found one that talks plaintext; nothing was sent to it: enable"
                " tls on the server, or use a nats:// address without tls_ca_file"
            )
        return super()._connect_command()

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except OSError:
            # asyncio never tells the stream under a failed TLS handshake that it has ended, and the client would wait
            # for that before it goes on to the next server.
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]
                self._transport = None
            raise
