"""Translates the paths, hosts and ports of a container into those of a process of this machine."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.ports import LOOPBACK, free_port

Service = Mapping[str, Any]

# The folders of a container that a process gets for its own; programs and devices stay where they are.
_OWN_PATH = re.compile(r"(?<![\w./])/(?=(?:data|etc/nats|opt|tmp)\b)")
_PORT_SETTING = re.compile(r"^(\s*\w*port: )(\d+)$", re.MULTILINE)


class Translation:
    """A folder for each service and each named volume, and a free port for each port of a service."""

    def __init__(self, services: Mapping[str, Service], folder: Path) -> None:
        self._folder = folder
        self._ports: dict[tuple[str, int], int] = {}
        names = "|".join(map(re.escape, sorted(services, key=len, reverse=True)))
        self._name = re.compile(rf"(?:\w+://)?({names})")
        self._address = re.compile(rf"(?<![\w.-])({names}|{re.escape(LOOPBACK)}):(\d+)\b")

    def port(self, service: str, number: int) -> int:
        """Return the port of this machine that stands for a port of a service."""
        if (service, number) not in self._ports:
            self._ports[service, number] = free_port()
        return self._ports[service, number]

    def path(self, service: str, path: str) -> Path:
        """Return the path of this machine that stands for an absolute path in a service's container."""
        return self._folder / service / path.lstrip("/")

    def mount(self, service: str, volumes: Iterable[Mapping[str, Any]]) -> None:
        """Put links to what a service's container mounts into the service's folder."""
        for volume in sorted(volumes, key=lambda mount: str(mount["target"])):
            target = self.path(service, volume["target"])
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_symlink() or target.exists():
                continue
            source = Path(volume["source"])
            if volume["type"] == "volume":
                source = self._folder / "volumes" / volume["source"]
                source.mkdir(parents=True, exist_ok=True)
            if source.suffix == ".conf":
                target.write_text(self._configuration(service, source.read_text()))
            else:
                target.symlink_to(source)

    def text(self, service: str, text: str) -> str:
        """Translate the paths and addresses in a text."""

        def address(found: re.Match[str]) -> str:
            host = service if found[1] == LOOPBACK else found[1]
            return f"{LOOPBACK}:{self.port(host, int(found[2]))}"

        return _OWN_PATH.sub(f"{self._folder / service}/", self._address.sub(address, text))

    def command(self, service: str, command: Sequence[str]) -> list[str]:
        """Translate a command; a service's name by itself is a host to listen on."""
        translated = []
        for before, argument in zip(["", *command], command, strict=False):
            if before == "--port":
                translated.append(str(self.port(service, int(argument))))
            elif before == "--host":
                translated.append(LOOPBACK)
            else:
                translated.append(self.text(service, argument))
        return translated

    def environment(self, service: str, environment: Mapping[str, str]) -> dict[str, str]:
        """Translate a service's environment."""
        return {name: self._variable(service, name, value) for name, value in environment.items()}

    def _variable(self, service: str, name: str, value: str) -> str:
        if name.endswith("PORT"):
            return str(self.port(service, int(value)))
        if not name.startswith("AIRFLOW_CONN_"):
            return self.text(service, value)
        connection = json.loads(value)
        host = self._name.fullmatch(connection["host"])
        if host is None:
            raise ValueError(f"expected a service of the compose file as host of {name}, found {connection['host']}")
        connection["host"] = connection["host"].replace(host[1], LOOPBACK)
        connection["port"] = self.port(host[1], connection["port"])
        return json.dumps(connection)

    def _configuration(self, service: str, text: str) -> str:
        return _PORT_SETTING.sub(
            lambda found: f"{found[1]}{self.port(service, int(found[2]))}", self.text(service, text)
        )
