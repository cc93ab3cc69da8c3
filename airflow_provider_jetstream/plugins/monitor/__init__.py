"""The plugin through which Airflow's UI gets the page that shows the queues."""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import urlsplit

from airflow.providers.common.compat.sdk import AirflowPlugin, conf

_PAGE = "jetstream"
# Relative, so that they hold under a base_url with a path too.
_RUN = f"{_PAGE}/?dag_id={{DAG_ID}}&run_id={{RUN_ID}}"
_TASK = f"{_RUN}&task_id={{TASK_ID}}&map_index={{MAP_INDEX}}"

_ICONS = {"icon": f"{_PAGE}/static/icon.svg", "icon_dark_mode": f"{_PAGE}/static/icon_dark.svg"}


class JetStreamMonitorPlugin(AirflowPlugin):
    """Registers the page, its views on DAG runs and task instances, and its card on the dashboard.

    Every Airflow process loads it, so what serves the page is imported by the one that asks for it.
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
        """The page's application, made when the API server asks for it."""
        from airflow_provider_jetstream.plugins.monitor.app import make_app

        return [{"app": make_app(), "url_prefix": f"/{_PAGE}", "name": "JetStream"}]

    @property
    def react_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The card on the dashboard, where Airflow shows nothing but these; it is a frame with the page in small."""
        # Before 3.3 a relative address would be taken as relative to Airflow's own scripts.
        path = urlsplit(conf.get("api", "base_url", fallback=None) or "").path.rstrip("/")
        card = f"{path}/{_PAGE}/static/host/card.js"
        return [{"name": "JetStream card", "bundle_url": card, "destination": "dashboard"}]
