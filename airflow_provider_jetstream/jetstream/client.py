"""The NATS client with two things mended: credentials never leave in plaintext, and a failed TLS handshake ends."""

from __future__ import annotations

from nats.aio.client import Client

from airflow_provider_jetstream.jetstream.errors import TLSError


class JetStreamClient(Client):
    """A client that sends its credentials only over TLS where TLS was asked for.

    nats-py connects in plaintext to a server that doesn't announce TLS, even for ``tls://`` addresses. The CONNECT
    line carries the credentials, so this is the last place to stop it, at the first connection and at every later one.

    :param encrypted: refuse plaintext
    """

    def __init__(self, *, encrypted: bool) -> None:
        super().__init__()
        self._encrypted = encrypted

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
