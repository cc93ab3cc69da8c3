"""nats-py's client as far as it connects: with TLS, by its credentials, and again after a loss.

Credentials are never sent in plaintext where TLS was asked for, a TLS handshake ends with the time limit, settings that
have changed are used by the next attempt, and only refused credentials close the connection for good.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, Any

from nats import errors as nats_errors
from nats.aio.client import Client

from airflow_provider_jetstream.jetstream.client.concurrency import keep_cancellation
from airflow_provider_jetstream.jetstream.client.credentials import connect_command
from airflow_provider_jetstream.jetstream.client.diagnostics import explain
from airflow_provider_jetstream.jetstream.client.outage import Outage
from airflow_provider_jetstream.jetstream.client.parser_choice import create_frame_parser
from airflow_provider_jetstream.jetstream.client.tls import plaintext_report, require_certificate, tls_context
from airflow_provider_jetstream.jetstream.client.transport import AbortableTransport
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TLSError

if TYPE_CHECKING:
    from nats.aio.client import Srv

    from airflow_provider_jetstream.jetstream.client.outage import RenewSettings
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

log = logging.getLogger(__name__)

_RENEW_SECONDS = 10.0


class RestoringClient(Client):
    """A client that sends its credentials only over TLS where TLS was asked for.

    nats-py connects in plaintext to a server that doesn't announce TLS, even for ``tls://`` addresses. The CONNECT
    line carries the credentials, so its creation is the last moment to stop that, at the first connection and at every
    later one.

    What isn't sent when a connection is lost is dropped: the client would send it over the next one, whenever that is.

    :param settings: servers, credentials and TLS; what was sent may be on its way for their time limit
    :param renew: reads the settings again, where a lost connection can't be restored by the ones known
    """

    def __init__(self, settings: ConnectionSettings, renew: RenewSettings | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.outage = Outage()
        self.close_reason: JetStreamProviderError | None = None
        # What the server has said right before it ended the connection.
        self.last_words: Exception | None = None
        self._renew = renew
        self.parser = create_frame_parser(self)
        if self.parser:
            self._ps = self.parser
        self._tls: ssl.SSLContext | None = None
        self._reconnected = asyncio.Event()

    async def wait_until_connected(self) -> None:
        """Wait while the client restores a lost connection; return at once from a closed one."""
        while not (self.is_connected or self.is_closed):
            await self._reconnected.wait()

    def abort(self) -> None:
        """Close the connection to the server, and drop what isn't sent."""
        if isinstance(self._transport, AbortableTransport):
            self._transport.abort()

    async def _attempt_reconnect(self) -> None:
        self.abort()
        self.outage.begin(self.last_words)
        self.last_words = None
        try:
            await super()._attempt_reconnect()
        finally:
            # Those who wait look again; each attempt has an event of its own.
            reconnected, self._reconnected = self._reconnected, asyncio.Event()
            reconnected.set()

    async def _read_loop(self) -> None:
        await super()._read_loop()
        task = asyncio.current_task()
        if self.is_connected and not (task and task.cancelling()):
            # The client ends it after an unexpected error, and would receive nothing more.
            await self._process_op_err(nats_errors.ProtocolError())

    async def _connect_to_server(self, s: Srv) -> None:
        if self.is_reconnecting:
            await self._look_at_settings()
        self.outage.is_explained = False
        if not self._transport:
            self._transport = AbortableTransport(self.settings.timeout)
        await keep_cancellation(super()._connect_to_server(s))

    async def _look_at_settings(self) -> None:
        """Read the settings again where that is due, and use them from now on where they have changed.

        :raises Error: they have changed, so the address that was about to be used isn't valid any more; or the
            connection is given up
        """
        self.outage.report(", ".join(self.settings.servers))
        if self._renew and self.outage.renewal_is_due:
            self.outage.note_renewal()
            try:
                async with asyncio.timeout(_RENEW_SECONDS):
                    settings = await self._renew()
            except Exception as error:  # noqa: BLE001
                # Whatever became of Airflow meanwhile: the settings that are known may work again.
                known = str(error) if isinstance(error, JetStreamProviderError) else type(error).__name__
                log.warning("The settings of the connection can't be read again: %s", known)
            else:
                if settings != self.settings:
                    self._use(settings)
                    raise nats_errors.Error("the settings of the connection have changed")
        if self.outage.is_refused_for_good:
            self.close_reason = explain(self.settings, self.outage.failures)
            # Without a server the client closes.
            self._server_pool.clear()
            raise nats_errors.Error("the connection is given up")

    def _use(self, settings: ConnectionSettings) -> None:
        log.info("The settings of the connection have changed: it goes on at %s", ", ".join(settings.servers))
        self.settings = settings
        self._server_pool.clear()
        self._setup_server_pool(list(settings.servers))
        self.use_tls_options()

    def use_tls_options(self) -> None:
        """Make the client use the name and the order of TLS that the settings ask for."""
        self.options["tls_handshake_first"] = self.settings.tls_handshake_first
        self.options.pop("tls_hostname", None)
        if self.settings.tls_server_name:
            self.options["tls_hostname"] = self.settings.tls_server_name

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """The TLS context of this attempt; its files may have been replaced since the last one."""
        if self._tls is None:
            self._tls = tls_context(self.settings)
        return self._tls

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002
        if self.settings.encrypted and info.get("tls_available"):
            # The server takes both.
            info["tls_required"] = True
        if initial_connection:
            require_certificate(self.settings, info)
        await super()._process_info(info, initial_connection)

    def _connect_command(self) -> bytes:
        if self.settings.encrypted and not self._server_info.get("tls_required"):
            raise TLSError(
                "expected a server that requires TLS, found one that talks plaintext; nothing was sent to it: enable"
                " tls on the server, or use a nats:// address without tls_ca_file"
            )
        return connect_command(self.settings, self._server_info)

    async def _process_connect_init(self) -> None:
        # Subscriptions are sent again by the client itself.
        self._pending, self._pending_data_size = [], 0
        self._tls = None
        try:
            # Each step has a limit; they have one together as well.
            async with asyncio.timeout(self.options["connect_timeout"]):
                await keep_cancellation(super()._process_connect_init())
        except BaseException as error:
            # asyncio never closes the stream under a TLS handshake that failed or was given up, and the client would
            # wait for that before it tries the next server.
            self.abort()
            if isinstance(error, OSError) and (said := await self._said(error)):
                self._transport = None
                raise nats_errors.Error(said) from None
            self._transport = None
            if not isinstance(error, Exception) or isinstance(error, (OSError, nats_errors.Error)):
                raise
            # Nothing else would be tried again.
            raise nats_errors.Error(f"{type(error).__name__}: {error}") from error
        if isinstance(self._transport, AbortableTransport):
            self._transport.end_handshake()

    async def _said(self, error: OSError) -> str:
        """Return what the server has said before a handshake failed; empty where it said nothing."""
        said = self._transport.end_handshake() if isinstance(self._transport, AbortableTransport) else ""
        if not said and isinstance(error, ssl.SSLError) and self._current_server:
            address = self._current_server.uri
            said = await asyncio.to_thread(plaintext_report, str(address.hostname), address.port or 0, error)
        return said
