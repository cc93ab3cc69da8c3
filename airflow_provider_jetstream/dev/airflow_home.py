"""The folder and the environment of an Airflow that lives in one folder."""

import base64
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from airflow_provider_jetstream.dev.listening_ports import LOOPBACK

# The arguments of the command ``airflow`` by component.
COMPONENTS = {
    "api-server": ["api-server"],
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
}
_PROXIES = {"http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "no_proxy"}


def airflow_env(
    *,
    home: Path,
    dags_folder: Path,
    port: int,
    connections: Mapping[str, str],
    users: Mapping[str, str],
    extra: Mapping[str, str],
    parallelism: int,
    path: str = "",
) -> dict[str, str]:
    """Return the whole environment of an Airflow's processes, which listen on the loopback address only.

    :param users: passwords by user; the name of a user is also its role
    :param connections: connection ids and the connections in JSON form
    :param extra: overrides the rest
    :param parallelism: how many tasks run at once
    :param path: of the address under which the API server is seen, such as ``/team``
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AIRFLOW_", "_AIRFLOW_")) and name.lower() not in _PROXIES
    }
    url = f"http://{LOOPBACK}:{port}{path}"
    env |= {
        "AIRFLOW_HOME": str(home),
        "NO_PROXY": "*",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        "SCARF_ANALYTICS": "False",
    }
    env |= {
        f"AIRFLOW__{name}": value
        for name, value in {
            "CORE__DAGS_FOLDER": str(dags_folder),
            "CORE__LOAD_EXAMPLES": "False",
            "CORE__EXECUTOR": "LocalExecutor",
            "CORE__PARALLELISM": str(parallelism),
            "CORE__FERNET_KEY": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
            "CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{name}:{name}" for name in users),
            "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
            "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{database_path(home)}",
            # With fifteen connections, sixteen tasks that start at once wait for each other: tasks with a connection
            # wait for the lock of the database, whose holder waits for a second one. Scheduler and triggerer die of it.
            "DATABASE__SQL_ALCHEMY_POOL_ENABLED": "False",
            "API__HOST": LOOPBACK,
            "API__PORT": str(port),
            "API__BASE_URL": url,
            "API__WORKERS": "1",
            # Each process would otherwise generate its own key, and refuse the tokens of the others.
            "API__SECRET_KEY": secrets.token_hex(16),
            "API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "LOGGING__LOGGING_LEVEL": "INFO",
            "LOGGING__UVICORN_LOGGING_LEVEL": "WARNING",
            "LOGGING__BASE_LOG_FOLDER": str(home / "logs"),
            "LOGGING__DAG_PROCESSOR_CHILD_PROCESS_LOG_DIRECTORY": str(home / "logs" / "dag_processor"),
            "DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH": str(home / "bundles"),
            "DAG_PROCESSOR__REFRESH_INTERVAL": "2",
            "DAG_PROCESSOR__BUNDLE_REFRESH_CHECK_INTERVAL": "1",
            "DAG_PROCESSOR__PRINT_STATS_INTERVAL": "0",
            "METRICS__STATSD_ON": "False",
        }.items()
    }
    env |= {f"AIRFLOW_CONN_{name.upper()}": value for name, value in connections.items()}
    return env | dict(extra)


def prepare_home(home: Path, users: Mapping[str, str]) -> None:
    """Create the folder of an Airflow with the files that its first command needs.

    :param users: passwords by user
    """
    home.mkdir(parents=True, exist_ok=True)
    # Without this file, all processes of the first start write it at the same time.
    (home / "airflow.cfg").touch()
    passwords = home / "passwords.json"
    passwords.write_text(json.dumps(dict(users)))
    passwords.chmod(0o600)


def database_path(home: Path) -> Path:
    """Return the path of an Airflow's metadata database."""
    return home / "airflow.db"
