"""Three real nats-servers on the loopback address that form one JetStream cluster."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from testbed.nats_server import NatsServer, NatsServerError, PortTakenError
from testbed.ports import LOOPBACK, free_ports

_T = TypeVar("_T")

_ATTEMPTS = 5
_NAMES = ("n1", "n2", "n3")
_PAUSE = 0.02


class NatsCluster:
    """
    Three nats-servers, each with a store that outlives its process.

    Its methods block while they wait; where an event loop has other work to do, call them in a thread.

    :param folder: holds the folders of the servers; by default a temporary one that the context removes
    :param jetstream_config: lines for the ``jetstream`` block of each, such as ``sync_interval: always``
    :param binary: the nats-server to run; by default the one that is found
    """

    def __init__(self, folder: Path | None = None, *, jetstream_config: str = "", binary: Path | None = None) -> None:
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="nats-cluster-"))
        self.servers = {
            name: NatsServer(self.folder / name, jetstream_config=jetstream_config, binary=binary) for name in _NAMES
        }

    @property
    def urls(self) -> tuple[str, ...]:
        """Where clients connect to, one address for each server whether it runs or not."""
        return tuple(server.url for server in self.servers.values())

    @property
    def alive(self) -> dict[str, NatsServer]:
        """The servers that run, by name."""
        return {name: server for name, server in self.servers.items() if server.alive}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def start(self, within: float = 20.0) -> None:
        """
        Start the servers on ports chosen now, and wait until they form a cluster.

        :param within: seconds they have together
        """
        for attempt in range(1, _ATTEMPTS + 1):
            self._configure()
            try:
                for server in self.servers.values():
                    server.start()
                break
            except PortTakenError:
                # Each server exchanges its own ports for clients itself, but all have to know each other's for routes.
                self.stop()
                if attempt == _ATTEMPTS:
                    raise
        self.wait_ready(within)

    def stop(self) -> None:
        """Shut all servers down."""
        for server in self.servers.values():
            server.stop()

    def server(self, name: str) -> NatsServer:
        """
        Return one of the servers.

        :param name: its name, such as :meth:`leader` gives
        """
        return self.servers[name]

    def kill(self, name: str) -> None:
        """
        Kill a server with SIGKILL.

        :param name: the server
        """
        self.servers[name].kill()

    def restart(self, name: str, within: float = 20.0) -> None:
        """
        Start a server again on the same ports and store, and wait until it belongs to the cluster again.

        Nothing is waited for where too few servers run to form a cluster.

        :param name: the server
        :param within: seconds that it has for that
        """
        self.servers[name].restart()
        if 2 * len(self.alive) > len(self.servers):
            self.wait_ready(within)

    def leader(self, stream: str, within: float = 20.0) -> str:
        """
        Name the server that leads a stream.

        :param stream: the stream
        :param within: seconds to wait for one where it is just being elected
        """
        return self._wait(f"{stream} has a leader", lambda: self._leader(f"STREAM.INFO.{stream}"), within)

    def consumer_leader(self, stream: str, consumer: str, within: float = 20.0) -> str:
        """
        Name the server that leads a consumer.

        :param stream: its stream
        :param consumer: the consumer
        :param within: seconds to wait for one where it is just being elected
        """
        what = f"CONSUMER.INFO.{stream}.{consumer}"
        return self._wait(f"{consumer} of {stream} has a leader", lambda: self._leader(what), within)

    def meta_leader(self, within: float = 20.0) -> str:
        """
        Name the server that leads the cluster itself.

        :param within: seconds to wait for one where it is just being elected
        """
        return self._wait("the cluster has a leader", self._meta_leader, within)

    def wait_ready(self, within: float = 20.0) -> None:
        """
        Wait until the running servers are current members of the cluster and answer JetStream's API.

        :param within: seconds until :class:`NatsServerError`
        """
        self._wait("the cluster is ready", self._ready, within)

    def wait_settled(self, stream: str, within: float = 20.0) -> None:
        """
        Wait until every replica of a stream and of its consumers runs and has all that its leader has.

        :param stream: the stream
        :param within: seconds until :class:`NatsServerError`
        """
        self._wait(f"all replicas of {stream} are current", lambda: self._settled(stream), within)

    def _configure(self) -> None:
        ports = free_ports(len(self.servers))
        routes = ", ".join(f'"nats://{LOOPBACK}:{port}"' for port in ports)
        for (name, server), port in zip(self.servers.items(), ports, strict=True):
            server.config = "\n".join(
                [
                    f"server_name: {name}",
                    # So that a stream without replicas can be placed: {"placement": {"tags": ["n1"]}}.
                    f"server_tags: [{name}]",
                    "cluster {",
                    "  name: testbed",
                    f'  listen: "{LOOPBACK}:{port}"',
                    f"  routes: [{routes}]",
                    "}",
                ]
            )

    def _remove(self) -> None:
        self.stop()
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _meta_leader(self) -> str:
        seen = {str(server.monitor("jsz")["meta_cluster"].get("leader", "")) for server in self.alive.values()}
        # Servers that don't know of its death yet still name the last one.
        (leader,) = seen if len(seen) == 1 else ("",)
        return leader if leader in self.alive else ""

    def _ready(self) -> bool:
        alive = self.alive
        leader = self._meta_leader()
        if not leader:
            return False
        replicas = alive[leader].monitor("jsz")["meta_cluster"].get("replicas") or []
        current = {replica["name"] for replica in replicas if replica["current"] and not replica.get("offline")}
        answers = (server.api("INFO") for server in alive.values())
        return current | {leader} >= alive.keys() and all("error" not in answer for answer in answers)

    def _leader(self, question: str) -> str:
        leader = str(self._ask(question)["cluster"].get("leader", ""))
        return leader if leader in self.alive else ""

    def _settled(self, stream: str) -> bool:
        info = self._ask(f"STREAM.INFO.{stream}")
        consumers = self._ask(f"CONSUMER.LIST.{stream}")
        if len(consumers["consumers"] or []) != info["state"]["consumer_count"]:
            return False
        groups = [each["cluster"] for each in (info, *(consumers["consumers"] or []))]
        replicas = [replica for group in groups for replica in group.get("replicas") or []]
        return all(group.get("leader") in self.alive for group in groups) and all(
            replica["current"] and not replica.get("offline") and not replica.get("lag") for replica in replicas
        )

    def _ask(self, question: str) -> dict[str, Any]:
        answer = next(iter(self.alive.values())).api(question)
        if error := answer.get("error"):
            raise ValueError(f"{error} in answer to {question}")
        return answer

    def _wait(self, what: str, look: Callable[[], _T], within: float) -> _T:
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            # While servers come and go they answer nothing, something else, or without what is asked for.
            with contextlib.suppress(OSError, ValueError, KeyError):
                if found := look():
                    return found
            time.sleep(_PAUSE)
        logs = "\n".join(f"{name}:\n{server.log()[-2000:]}" for name, server in self.servers.items())
        raise NatsServerError(f"waited {within:g} s until {what}:\n{logs}")
