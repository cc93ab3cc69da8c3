"""An API server of several worker processes: which of them answers a request, and the answers of all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from testbed.airflow import Airflow
from testbed.airflow_settings import migrate, prepare_home

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_PAUSE = 0.05


class ApiServer(Airflow):
    """An Airflow of which only the API server runs."""

    def start(self, *_: str, timeout: float = 300.0) -> None:
        """Create the database, start the API server and wait until it answers."""
        prepare_home(self.home)
        migrate(self.home, self.env, self.python, self.template_db)
        try:
            self._start_component("api-server", ["api-server"])
            self._wait(lambda: None if self.health() else "no health", time.monotonic() + timeout)
        except BaseException:
            self.stop(grace=0)
            raise

    def worker_pids(self) -> set[int]:
        """Return the processes that listen for requests, but for the one that started them where it has others."""
        pids = self.pids()["api-server"]
        listening = {pid for pid in pids if _listens(pid, self.port)}
        parents = {psutil.Process(pid).ppid() for pid in listening}
        return listening - parents or listening


def answers_by_worker(
    server: Airflow, pids: Collection[int], path: str, within: float = 120.0
) -> Mapping[int, dict[str, Any]]:
    """Request the same of every worker process; raise TimeoutError where one hasn't answered.

    :param pids: of the workers
    """
    answers: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + within
    while answers.keys() < set(pids):
        if time.monotonic() > deadline:
            raise TimeoutError(f"of the workers {sorted(pids)}, only {sorted(answers)} answered within {within:g} s")
        # A connection of its own: which worker accepts it is chance.
        with httpx.Client(trust_env=False, timeout=60) as client:
            headers = {"Authorization": f"Bearer {server.token()}"}
            with client.stream("GET", f"{server.url}{path}", headers=headers) as answer:
                port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
                pid = next((pid for pid in pids if _is_connected(pid, port)), None)
                answer.read()
        if pid is not None and answer.status_code == httpx.codes.OK:
            answers[pid] = answer.json()
        else:
            time.sleep(_PAUSE)
    return answers


def _listens(pid: int, port: int) -> bool:
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in _connections(pid))


def _is_connected(pid: int, client_port: int) -> bool:
    return any(each.raddr and each.raddr.port == client_port for each in _connections(pid))


def _connections(pid: int) -> list[Any]:
    try:
        return list(psutil.Process(pid).net_connections("tcp"))
    except psutil.Error:
        return []
