"""A client of Airflow's REST API."""

import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import httpx

_FINISHED = {"success", "failed"}
_LOCKED_TRIES = 8
_LOCKED_PAUSE = 0.5


class AirflowApiError(RuntimeError):
    """Airflow's REST API refused a request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class AirflowClient:
    """A client of one user for the API server at ``url``."""

    def __init__(self, url: str, user: str = "admin", password: str = "admin") -> None:  # noqa: S107 - the testbed's own
        self.url = url
        self.user = user
        self._password = password
        self._token: str | None = None
        self._http = _http_client()

    def token(self) -> str:
        """Return a token for the header ``Authorization: Bearer``."""
        if self._token is None:
            body = {"username": self.user, "password": self._password}
            answer = self._http.post(f"{self.url}/auth/token", json=body)
            self._token = str(self._parsed(answer)["access_token"])
        return self._token

    def request(self, method: str, path: str, json: object = None, *, anonymous: bool = False) -> httpx.Response:
        """Send a request and return the answer whatever its status.

        ``path`` starts with a slash from the server's root, else it is relative to ``/api/v2/``.
        """
        url = f"{self.url}{path}" if path.startswith("/") else f"{self.url}/api/v2/{path}"
        headers = {} if anonymous else {"Authorization": f"Bearer {self.token()}"}
        return self._http.request(method, url, json=json, headers=headers)

    def api(self, method: str, path: str, json: object = None) -> Any:
        """Send a request and return the parsed answer, ``None`` for an empty one; raises AirflowApiError.

        Airflow records a change of a user on its event loop. Where a task that starts has locked sqlite just then, and
        needs the loop to go on, both wait until the change fails with status 500, which nothing was done for.
        """
        for _ in range(_LOCKED_TRIES):
            answer = self.request(method, path, json)
            if answer.status_code != HTTPStatus.INTERNAL_SERVER_ERROR:
                break
            time.sleep(_LOCKED_PAUSE)
        return self._parsed(answer)

    @staticmethod
    def _parsed(answer: httpx.Response) -> Any:
        if answer.is_error:
            request = f"{answer.request.method} {answer.request.url.raw_path.decode()}"
            raise AirflowApiError(f"{request}: {answer.status_code} {answer.text[:2000]}", answer.status_code)
        return answer.json() if answer.content else None

    def health(self) -> dict[str, Any]:
        """Return ``/api/v2/monitor/health``, which needs no user."""
        health: dict[str, Any] = self._parsed(self.request("GET", "monitor/health", anonymous=True))
        return health

    def import_errors(self) -> list[dict[str, Any]]:
        """Return the errors of the DAG files that can't be parsed."""
        errors: list[dict[str, Any]] = self.api("GET", "importErrors")["import_errors"]
        return errors

    def dag(self, dag_id: str) -> dict[str, Any] | None:
        """Return a DAG, ``None`` when Airflow doesn't know it."""
        answer = self.request("GET", f"dags/{quote(dag_id, safe='')}")
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return None
        dag: dict[str, Any] = self._parsed(answer)
        return dag

    def unpause(self, dag_id: str) -> None:
        """Unpause a DAG."""
        self.api("PATCH", f"dags/{quote(dag_id, safe='')}", {"is_paused": False})

    def reparse(self, dag_id: str) -> None:
        """Have the file of a DAG parsed soon, whatever the interval of the dag processor."""
        dag = self.dag(dag_id)
        if dag is None:
            raise LookupError(f"Airflow doesn't know the DAG {dag_id}")
        self.api("PUT", f"parseDagFile/{quote(dag['file_token'], safe='')}")

    def trigger(self, dag_id: str, conf: Mapping[str, object] | None = None, *, run_id: str | None = None) -> str:
        """Start a run of a DAG and return its run id, by default one that Airflow generates."""
        body = {"logical_date": None, "conf": dict(conf or {}), "dag_run_id": run_id}
        return str(self.api("POST", f"dags/{quote(dag_id, safe='')}/dagRuns", body)["dag_run_id"])

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """Return a run of a DAG."""
        run: dict[str, Any] = self.api("GET", _run_path(dag_id, run_id))
        return run

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        """Return the runs of a DAG, oldest first, at most 100."""
        path = f"dags/{quote(dag_id, safe='')}/dagRuns?limit=100&order_by=run_after"
        runs: list[dict[str, Any]] = self.api("GET", path)["dag_runs"]
        return runs

    def wait_for_run(
        self,
        dag_id: str,
        run_id: str,
        timeout: float = 300.0,
        on_poll: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Wait until a run has succeeded or failed and return it; ``on_poll`` is called with the run at each poll."""
        deadline = time.monotonic() + timeout
        while True:
            run = self.run(dag_id, run_id)
            if on_poll:
                on_poll(run)
            if run["state"] in _FINISHED:
                return run
            if time.monotonic() > deadline:
                tasks = {_label(task): task["state"] for task in self.task_instances(dag_id, run_id)}
                problem = f"{dag_id} {run_id} is {run['state']} after {timeout:g} s"
                raise TimeoutError(f"{problem}; its tasks: {tasks}")
            time.sleep(0.3)

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Return all task instances of a run."""
        tasks: list[dict[str, Any]] = []
        while True:
            page = self.api("GET", f"{_run_path(dag_id, run_id)}/taskInstances?limit=100&offset={len(tasks)}")
            tasks += page["task_instances"]
            if not page["task_instances"] or len(tasks) >= page["total_entries"]:
                return tasks

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1) -> Any:
        """Return the value of an XCom."""
        task = f"{_run_path(dag_id, run_id)}/taskInstances/{quote(task_id, safe='')}"
        path = f"{task}/xcomEntries/{quote(key, safe='')}?map_index={map_index}"
        return self.api("GET", path)["value"]

    def close(self) -> None:
        """Close the connections to the API server; the next request opens new ones."""
        self._http.close()
        self._http = _http_client()


def _http_client() -> httpx.Client:
    # The machine's proxy settings don't apply to the loopback address.
    return httpx.Client(trust_env=False, timeout=120.0)


def _run_path(dag_id: str, run_id: str) -> str:
    return f"dags/{quote(dag_id, safe='')}/dagRuns/{quote(run_id, safe='')}"


def _label(task: Mapping[str, Any]) -> str:
    return str(task["task_id"] if task["map_index"] < 0 else f"{task['task_id']}[{task['map_index']}]")
