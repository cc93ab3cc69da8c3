"""The health check of a worker's container, against a monitoring endpoint."""

import importlib.util
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def monitoring(clients: list[str], status: int = 200) -> Iterator[str]:
    """Serve /connz in pages, like a nats-server that these addresses are connected to."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            limit, offset = (int(number) for number in re.findall(r"=(\d+)", self.path))
            page = [{"ip": client} for client in clients[offset : offset + limit]]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"total": len(clients), "connections": page}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def worker_health() -> ModuleType:
    spec = importlib.util.spec_from_file_location("worker_health", ROOT / "docker" / "worker_health.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("clients", "status", "code"),
    [
        (["127.0.0.1"], 200, 0),
        (["10.0.0.1"] * 1500 + ["127.0.0.1"], 200, 0),
        (["10.0.0.1"] * 1500, 200, 1),
        ([], 200, 1),
        (["127.0.0.1"], 500, 1),
    ],
)
def test_a_worker_is_healthy_while_it_is_connected(
    worker_health: ModuleType, monkeypatch: pytest.MonkeyPatch, clients: list[str], status: int, code: int
) -> None:
    with monitoring(clients, status) as url:
        monkeypatch.setenv("NATS_MONITOR_URL", url)
        assert worker_health.main() == code


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "no-url"])
def test_a_worker_without_a_server_is_unhealthy(
    worker_health: ModuleType, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("NATS_MONITOR_URL", url)
    assert worker_health.main() == 1
