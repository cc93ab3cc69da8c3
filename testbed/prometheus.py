"""Prometheus and its promtool, from PATH or Debian's package; it scrapes an exporter and evaluates the alert rules."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from airflow_provider_jetstream.dev.process import Process
from testbed.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

_REPOSITORY = Path(__file__).resolve().parent.parent
ALERTS = _REPOSITORY / "monitoring" / "alerts.yaml"


class NoPrometheusError(FileNotFoundError):
    """Prometheus can't be had on this machine."""


@functools.cache
def prometheus_program(name: str) -> Path:
    """Return ``prometheus`` or ``promtool``: on PATH, or Debian's, unpacked into ``.cache/debian``.

    :raises NoPrometheusError: neither is there
    """
    if on_path := shutil.which(name):
        return Path(on_path)
    cache = _REPOSITORY / ".cache" / "debian"
    unpacked = cache / "prometheus"
    if not (unpacked / "usr" / "bin" / name).exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            raise NoPrometheusError(f"expected {name} on PATH or Debian's apt-get, found neither: install Prometheus")
        cache.mkdir(parents=True, exist_ok=True)
        try:
            _unpack(cache, unpacked)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            raise NoPrometheusError(
                f"expected {name} on PATH or Debian's package prometheus, found neither: {error}; run apt-get update,"
                " or install Prometheus"
            ) from error
    return unpacked / "usr" / "bin" / name


def _unpack(cache: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        folder = Path(temporary)
        # Otherwise apt downloads as an unprivileged user that can't write here.
        _run(["apt-get", "-q", "-o", "APT::Sandbox::User=", "download", "prometheus"], folder)
        (package,) = folder.glob("prometheus_*.deb")
        _run(["dpkg", "-x", str(package), "root"], folder)
        # In one step, so that parallel runs never see a partial copy.
        try:
            (folder / "root").rename(target)
        except OSError:
            if not target.exists():
                raise


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} failed with {done.returncode}: {done.stderr.strip()[-300:]}")


@contextmanager
def exporter(url: str, *arguments: str) -> Iterator[int]:
    """Run ``jetstream-queue exporter``, which looks twice a second, until the block ends; yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "airflow_provider_jetstream.command.program", "exporter", "--port", str(port)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NATS_")}
    process = subprocess.Popen(
        [*command, "--address", LOOPBACK, "--interval", "0.5", *arguments, "--server", url], env=clean
    )
    try:
        yield port
    finally:
        process.terminate()
        ended = process.wait(30)
    if ended != 0:
        raise RuntimeError(f"expected the exporter to end with exit code {0}, found {ended}")


class Prometheus:
    """A running Prometheus.

    :param port: where it listens
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://{LOOPBACK}:{port}/api/v1"

    def firing(self) -> dict[str, list[dict[str, Any]]]:
        """Return the alerts that fire, by their names; none while it doesn't answer."""
        found: dict[str, list[dict[str, Any]]] = {}
        for alert in self._get("alerts").get("alerts", []):
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert)
        return found

    def rule_problems(self) -> dict[str, str]:
        """Return the rules that can't be evaluated, or haven't been yet, with what is wrong."""
        groups = self._get("rules").get("groups", [{"rules": [{"name": "all", "health": "unknown"}]}])
        rules = [rule for group in groups for rule in group["rules"]]
        return {rule["name"]: rule.get("lastError") or rule["health"] for rule in rules if rule["health"] != "ok"}

    def values(self, expression: str) -> list[float]:
        """Return the values of what an expression gives now.

        :raises ValueError: Prometheus doesn't understand it
        """
        try:
            found = self._get(f"query?{urllib.parse.urlencode({'query': expression})}")
        except urllib.error.HTTPError as error:
            raise ValueError(f"{expression}: {error.read().decode()}") from None
        return [float(series["value"][1]) for series in found.get("result", [])]

    def _get(self, what: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self._url}/{what}", timeout=10) as answer:  # noqa: S310
                found: dict[str, Any] = json.load(answer)["data"]
        except OSError as error:
            # Not there yet, or starting.
            if isinstance(error, urllib.error.HTTPError) and error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            return {}
        return found


@contextmanager
def prometheus(exporter: int, folder: Path) -> Iterator[Prometheus]:
    """Run a Prometheus with the alert rules of this repository, which scrapes an exporter each second.

    :param exporter: the exporter's port
    :param folder: for its configuration, data and log
    """
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": "jetstream-queues", "static_configs": [{"targets": [f"{LOOPBACK}:{exporter}"]}]}
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    command = [str(prometheus_program("prometheus")), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={LOOPBACK}:{port}"]
    process = Process.start(command, env={}, log_file=folder / "prometheus.log")
    try:
        yield Prometheus(port)
    finally:
        process.terminate(10)


if __name__ == "__main__":
    print(prometheus_program(sys.argv[1] if len(sys.argv) > 1 else "promtool"))
