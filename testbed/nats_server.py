"""A real nats-server on the loopback address."""

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from airflow_provider_jetstream.dev.nats_binary import find_nats_server, nats_server_version
from airflow_provider_jetstream.dev.process import Process
from testbed.certificates import TlsFiles
from testbed.nats_binaries import debian_nats_server
from testbed.ports import LOOPBACK, free_ports

__all__ = [
    "NatsServer",
    "NatsServerError",
    "PortTakenError",
    "debian_nats_server",
    "find_nats_server",
    "nats_server_version",
]

_ATTEMPTS = 5
_OPTIONS = '{"verbose": false, "pedantic": false, "headers": true, "no_responders": true}'
# The machine's proxy settings don't apply to the loopback address.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NatsServerError(RuntimeError):
    """A nats-server ended or didn't become ready; the message holds the end of its log."""


class PortTakenError(NatsServerError):
    """A nats-server found one of its ports taken."""


class NatsServer:
    """One nats-server with a store that outlives its process.

    :param folder: holds configuration, log and store; by default a temporary one that the context removes
    :param user: with ``password``, the only user accepted
    :param tls: certificates; the server then talks TLS only
    :param tls_verify: whether clients must show a certificate of the same authority
    :param jetstream_config: lines for the ``jetstream`` block, such as ``sync_interval: always``
    :param config: lines for the top level of the configuration
    :param binary: the nats-server to run; by default :func:`find_nats_server`
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        tls: TlsFiles | None = None,
        tls_verify: bool = False,
        jetstream: bool = True,
        jetstream_config: str = "",
        config: str = "",
        binary: Path | None = None,
    ) -> None:
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="nats-server-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = self.folder / "store"
        self.log_file = self.folder / "nats-server.log"
        self.binary = binary or find_nats_server()
        self.user, self.password, self.token = user, password, token
        self.tls, self.tls_verify = tls, tls_verify
        self.jetstream, self.jetstream_config = jetstream, jetstream_config
        self.config = config
        self.port = 0
        self.monitor_port = 0
        self.version = ""
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """The address for clients, without credentials."""
        return f"{'tls' if self.tls else 'nats'}://{LOOPBACK}:{self.port}"

    @property
    def monitor_url(self) -> str:
        """The server's HTTP monitoring endpoint."""
        return f"http://{LOOPBACK}:{self.monitor_port}"

    @property
    def pid(self) -> int | None:
        """The id of the server's process, ``None`` while it doesn't run."""
        return self._process.pid if self._process and self._process.alive else None

    @property
    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self.pid is not None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._remove_temporary()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._remove_temporary()

    def start(self, timeout: float = 30.0) -> None:
        """Start the server and wait until it is ready; the first start chooses the port, later ones keep it."""
        if self.alive:
            raise RuntimeError(f"the nats-server at {self.url} already runs")
        keep_port = self.port != 0
        for attempt in range(1, _ATTEMPTS + 1):
            if not keep_port:
                self.port, self.monitor_port = free_ports(2)
            try:
                self._start_once(timeout)
            except PortTakenError:
                if attempt == _ATTEMPTS:
                    raise
                if keep_port:
                    time.sleep(0.5)
            else:
                return

    def stop(self, grace: float = 10.0) -> None:
        """Shut the server down; it is killed after ``grace`` seconds."""
        if self._process:
            self._process.terminate(grace)
            self._process = None

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self._process:
            self._process.kill()
            self._process = None

    def keep(self, stream: str) -> None:
        """Copy what a stream has on disk now, for :meth:`lose_power`."""
        shutil.copytree(self._stored(stream), self.folder / f"{stream}-before")

    def lose_power(self, stream: str) -> None:
        """Kill the server, and start it with a stream as it was kept; the other streams have what they had."""
        self.kill()
        shutil.rmtree(self._stored(stream))
        shutil.copytree(self.folder / f"{stream}-before", self._stored(stream))
        self.start()

    def _stored(self, stream: str) -> Path:
        return self.store / "jetstream" / "$G" / "streams" / stream

    def restart(self) -> None:
        """Start the server again on the same port and store, shutting it down first if it runs."""
        self.stop()
        self.start()

    def reload(self) -> None:
        """Make the running server read its configuration, with the values of now, again."""
        if self.pid is None:
            raise RuntimeError(f"the nats-server at {self.url} doesn't run")
        self._write_configuration()
        os.kill(self.pid, signal.SIGHUP)

    def log(self) -> str:
        """Return all that the server has logged over all its starts."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def monitor(self, path: str) -> Any:
        """Get a path of the server's monitoring endpoint, such as ``jsz?streams=true``."""
        with _direct.open(f"{self.monitor_url}/{path}", timeout=5) as answer:
            return json.load(answer)

    def api(self, subject: str, payload: Mapping[str, Any] | None = None, timeout: float = 2.0) -> dict[str, Any]:
        """Send a request of the JetStream API as a client without credentials and TLS does.

        ``subject`` is the part after ``$JS.API.``; raises TimeoutError after ``timeout`` seconds.
        """
        inbox = f"_INBOX.{uuid4().hex}"
        body = "" if payload is None else json.dumps(payload)
        request = f"CONNECT {_OPTIONS}\r\nSUB {inbox} 1\r\nPUB $JS.API.{subject} {inbox} {len(body)}\r\n{body}\r\n"
        deadline = time.monotonic() + timeout
        with socket.create_connection((LOOPBACK, self.port), timeout=timeout) as connection:
            lines = connection.makefile("rb")
            connection.sendall(request.encode())
            while line := lines.readline():
                if line.startswith((b"HMSG ", b"-ERR")):
                    raise OSError(f"no responders on {subject}: {line!r}")
                if line.startswith(b"MSG "):
                    answer: dict[str, Any] = json.loads(lines.read(int(line.split()[-1])))
                    return answer
                connection.settimeout(max(0.001, deadline - time.monotonic()))
        raise OSError(f"the server closed the connection after a request on {subject}")

    def _remove_temporary(self) -> None:
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start_once(self, timeout: float) -> None:
        config_file = self._write_configuration()
        process = Process.start([self.binary, "-c", config_file], log_file=self.log_file, cwd=self.folder)
        try:
            self._wait_until_ready(process, timeout)
        except BaseException:
            process.kill()
            raise
        self._process = process

    def _write_configuration(self) -> Path:
        config_file = self.folder / "nats-server.conf"
        config_file.write_text(self._configuration())
        config_file.chmod(0o600)
        return config_file

    def _configuration(self) -> str:
        lines = [f'listen: "{LOOPBACK}:{self.port}"', f'http: "{LOOPBACK}:{self.monitor_port}"']
        if self.jetstream:
            store = json.dumps(str(self.store))
            lines += ["jetstream {", f"  store_dir: {store}", self.jetstream_config, "}"]
        authorization = {"user": self.user, "password": self.password, "token": self.token}
        # The server's configuration knows no escapes of characters.
        credentials = [
            f"  {key}: {json.dumps(value, ensure_ascii=False)}"
            for key, value in authorization.items()
            if value is not None
        ]
        if credentials:
            lines += ["authorization {", *credentials, "}"]
        if self.tls:
            files = {"cert_file": self.tls.cert, "key_file": self.tls.key, "ca_file": self.tls.ca}
            lines += ["tls {", *(f"  {key}: {json.dumps(str(path))}" for key, path in files.items())]
            lines += [f"  verify: {json.dumps(self.tls_verify)}", "}"]
        return "\n".join([*lines, self.config, ""])

    def _wait_until_ready(self, process: Process, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not process.alive:
                failed = PortTakenError if "address already in use" in process.output() else NatsServerError
                raise failed(f"nats-server ended with {process.returncode}:\n{process.tail()}")
            with contextlib.suppress(OSError, ValueError):
                if self._healthy():
                    self.version = str(self._banner()["version"])
                    return
            time.sleep(0.02)
        raise NatsServerError(f"nats-server isn't ready after {timeout:g} s:\n{process.tail()}")

    def _healthy(self) -> bool:
        query = "?js-enabled-only=true" if self.jetstream else ""
        return bool(self.monitor(f"healthz{query}")["status"] == "ok")

    def _banner(self) -> dict[str, Any]:
        with socket.create_connection((LOOPBACK, self.port), timeout=2) as connection:
            line = connection.makefile("rb").readline()
        if not line.startswith(b"INFO "):
            raise ValueError(f"expected the banner of a nats-server, found {line!r}")
        banner: dict[str, Any] = json.loads(line[5:])
        return banner
