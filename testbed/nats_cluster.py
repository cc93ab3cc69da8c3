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
    """Three nats-servers, each with a store that outlives its process.

    The methods block while they wait; an event loop with other work calls them in a thread. ``within`` is in seconds,
    and NatsServerError follows.

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
        """The addresses for clients, one for each server whether it runs or not."""
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
        """Start the servers on ports chosen now, and wait until they form a cluster."""
        for attempt in range(1, _ATTEMPTS + 1):
            self._configure()
            try:
                for server in self.servers.values():
                    server.start()
                break
            except PortTakenError:
                # Each server chooses another client port by itself, but the route ports are known to all servers.
                self.stop()
                if attempt == _ATTEMPTS:
                    raise
        self.wait_ready(within)
        # nats-server 2.11 may still take a current member for offline, and then places no stream of three replicas.
        self._wait("the cluster places a stream", self._places_streams, within)

    def stop(self) -> None:
        """Shut all servers down."""
        for server in self.servers.values():
            server.stop()

    def server(self, name: str) -> NatsServer:
        """Return a server by its name, such as :meth:`leader` returns."""
        return self.servers[name]

    def kill(self, name: str) -> None:
        """Kill a server with SIGKILL."""
        self.servers[name].kill()

    def restart(self, name: str, within: float = 20.0) -> None:
        """Start a server again on the same ports and store, and wait until it is a current member of the cluster again.

        It doesn't wait where too few servers run to form a cluster.
        """
        self.servers[name].restart()
        if 2 * len(self.alive) > len(self.servers):
            self.wait_ready(within)

    def leader(self, stream: str, within: float = 20.0) -> str:
        """Return the name of a stream's leader, waiting for an election."""
        return self._wait(f"{stream} has a leader", lambda: self._leader(f"STREAM.INFO.{stream}"), within)

    def consumer_leader(self, stream: str, consumer: str, within: float = 20.0) -> str:
        """Return the name of a consumer's leader, waiting for an election."""
        request = f"CONSUMER.INFO.{stream}.{consumer}"
        return self._wait(f"{consumer} of {stream} has a leader", lambda: self._leader(request), within)

    def meta_leader(self, within: float = 20.0) -> str:
        """Return the name of the cluster's meta leader, waiting for an election."""
        return self._wait("the cluster has a leader", self._meta_leader, within)

    def wait_ready(self, within: float = 20.0) -> None:
        """Wait until the running servers are current members of the cluster and answer JetStream's API."""
        self._wait("the cluster is ready", self._ready, within)

    def wait_settled(self, stream: str, within: float = 20.0) -> None:
        """Wait until every replica of a stream and of its consumers runs and is as current as its leader."""
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
        named = {str(server.monitor("jsz")["meta_cluster"].get("leader", "")) for server in self.alive.values()}
        # Servers that haven't noticed the loss of the last leader still name it.
        (leader,) = named if len(named) == 1 else ("",)
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

    def _places_streams(self) -> bool:
        probe = {"name": "placed", "subjects": ["placed"], "num_replicas": len(self.servers)}
        self._request("STREAM.CREATE.placed", probe)
        self._request("STREAM.DELETE.placed")
        return True

    def _leader(self, request: str) -> str:
        leader = str(self._request(request)["cluster"].get("leader", ""))
        return leader if leader in self.alive else ""

    def _settled(self, stream: str) -> bool:
        info = self._request(f"STREAM.INFO.{stream}")
        consumers = self._request(f"CONSUMER.LIST.{stream}")
        if len(consumers["consumers"] or []) != info["state"]["consumer_count"]:
            return False
        groups = [member["cluster"] for member in (info, *(consumers["consumers"] or []))]
        replicas = [replica for group in groups for replica in group.get("replicas") or []]
        return all(group.get("leader") in self.alive for group in groups) and all(
            replica["current"] and not replica.get("offline") and not replica.get("lag") for replica in replicas
        )

    def _request(self, request: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = next(iter(self.alive.values())).api(request, payload)
        if error := answer.get("error"):
            raise ValueError(f"{error} in answer to {request}")
        return answer

    def _wait(self, what: str, check: Callable[[], _T], within: float) -> _T:
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            # While servers start and stop they don't answer, answer something else, or leave out fields.
            with contextlib.suppress(OSError, ValueError, KeyError):
                if value := check():
                    return value
            time.sleep(_PAUSE)
        logs = "\n".join(f"{name}:\n{server.log()[-2000:]}" for name, server in self.servers.items())
        raise NatsServerError(f"waited {within:g} s until {what}:\n{logs}")
