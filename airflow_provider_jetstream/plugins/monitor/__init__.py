"""The plugin that adds the page about work queues to Airflow's UI."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from airflow import __version__ as airflow_version

from airflow_provider_jetstream.airflow_compat import AirflowPlugin, conf
from airflow_provider_jetstream.tasks.xcom_classes import allow_classes

_PAGE = "jetstream"
_STATIC = Path(__file__).parent / "static"
# Relative, so that they work under a base_url with a path too.
_RUN = f"{_PAGE}/?dag_id={{DAG_ID}}&run_id={{RUN_ID}}"
_TASK = f"{_RUN}&task_id={{TASK_ID}}&map_index={{MAP_INDEX}}"

_ICONS = {"icon": f"{_PAGE}/static/icon.svg", "icon_dark_mode": f"{_PAGE}/static/icon_dark.svg"}
_JOBS = "JetStream jobs"
_NAVIGATION = {
    "name": "JetStream",
    "href": f"{_PAGE}/",
    "url_route": _PAGE,
    "destination": "nav",
    "category": "browse",
    **_ICONS,
}
# Where Airflow shows no React app on a run or a task.
_FRAMES = [
    {"name": _JOBS, "href": _RUN, "url_route": f"{_PAGE}_run", "destination": "dag_run", **_ICONS},
    {"name": _JOBS, "href": _TASK, "url_route": f"{_PAGE}_task", "destination": "task_instance", **_ICONS},
]
_NATIVE_TABS = tuple(map(int, re.findall(r"\d+", airflow_version)[:2])) >= (3, 2)
_TABS = {
    "dag": ("JetStream letters", f"{_PAGE}_dag"),
    "dag_run": (_JOBS, f"{_PAGE}_run"),
    "task_instance": (_JOBS, f"{_PAGE}_task"),
}


# In each process that runs tasks, before it reads an XCom.
allow_classes()


class JetStreamMonitorPlugin(AirflowPlugin):
    """Registers the page, its tabs on DAG runs and task instances, and its card on the dashboard.

    Every Airflow process loads it, so the modules that serve the page are imported only by the API server.
    """

    name = "jetstream_monitor"
    external_views: ClassVar[list[Any]] = [_NAVIGATION, *([] if _NATIVE_TABS else _FRAMES)]  # type: ignore[misc]

    @property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The page's application, made when the API server reads this property."""
        from airflow_provider_jetstream.plugins.monitor.app import make_app

        return [{"app": make_app(), "url_prefix": f"/{_PAGE}", "name": "JetStream"}]

    @property
    def react_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The card on the dashboard, and the tabs: one script has the functions of all of them."""
        # Airflow before 3.3 resolves a relative address against its own scripts.
        path = urlsplit(conf.get("api", "base_url", fallback=None) or "").path.rstrip("/")
        script = json.loads((_STATIC / "assets.json").read_text())["airflow"]
        bundle = {"bundle_url": f"{path}/{_PAGE}/static/{script}"}
        card = {"name": "JetStream card", "destination": "dashboard", **bundle}
        if not _NATIVE_TABS:
            return [card]
        tabs = [
            {"name": name, "url_route": route, "destination": destination, **_ICONS, **bundle}
            for destination, (name, route) in _TABS.items()
        ]
        return [card, *tabs]
