"""The plugin that adds the page about work queues to Airflow's UI."""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import urlsplit

from airflow_provider_jetstream.airflow_compat import AirflowPlugin, conf

_PAGE = "jetstream"
# Relative, so that they work under a base_url with a path too.
_RUN = f"{_PAGE}/?dag_id={{DAG_ID}}&run_id={{RUN_ID}}"
_TASK = f"{_RUN}&task_id={{TASK_ID}}&map_index={{MAP_INDEX}}"

_ICONS = {"icon": f"{_PAGE}/static/icon.svg", "icon_dark_mode": f"{_PAGE}/static/icon_dark.svg"}


class JetStreamMonitorPlugin(AirflowPlugin):
    """Registers the page, its views on DAG runs and task instances, and its card on the dashboard.

    Every Airflow process loads it, so the modules that serve the page are imported only by the API server.
    """

    name = "jetstream_monitor"
    external_views: ClassVar[list[Any]] = [  # type: ignore[misc]
        {
            "name": "JetStream",
            "href": f"{_PAGE}/",
            "url_route": _PAGE,
            "destination": "nav",
            "category": "browse",
            **_ICONS,
        },
        {"name": "JetStream jobs", "href": _RUN, "url_route": f"{_PAGE}_run", "destination": "dag_run", **_ICONS},
        {
            "name": "JetStream jobs",
            "href": _TASK,
            "url_route": f"{_PAGE}_task",
            "destination": "task_instance",
            **_ICONS,
        },
    ]

    @property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The page's application, made when the API server reads this property."""
        from airflow_provider_jetstream.plugins.monitor.app import make_app

        return [{"app": make_app(), "url_prefix": f"/{_PAGE}", "name": "JetStream"}]

    @property
    def react_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The card on the dashboard, where Airflow allows only React apps: a frame around a small form of the page."""
        # Airflow before 3.3 resolves a relative address against its own scripts.
        path = urlsplit(conf.get("api", "base_url", fallback=None) or "").path.rstrip("/")
        card = f"{path}/{_PAGE}/static/host/card.js"
        return [{"name": "JetStream card", "bundle_url": card, "destination": "dashboard"}]
