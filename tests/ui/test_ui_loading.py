"""How the page is loaded, and what it draws of times that nobody sampled."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from playwright.sync_api import expect
from ui_steps import blocking, with_connection

from testbed.queues import make_queue

if TYPE_CHECKING:
    from playwright.sync_api import Request, Route
    from ui_browsing import Browsing

    from airflow_provider_jetstream.jetstream import ConnectionSettings


def test_the_first_view_needs_two_round_trips(browsing: Browsing, settings: ConnectionSettings) -> None:
    blocking(with_connection(settings, make_queue, "loading"))
    page = browsing.open("static/icon.svg")
    requested: list[str] = []
    held: list[Route] = []
    everything = threading.Event()

    def note(request: Request) -> None:
        requested.append(request.url.partition("/jetstream/")[2].partition("?")[0])

    def hold(route: Route) -> None:
        held.append(route)

    page.on("request", note)
    # Whatever the page requests before its script has come is requested at once with it.
    page.route("**/static/**.js", hold)
    page.goto(f"{browsing.url}/jetstream/", wait_until="commit")
    wanted = {"api/me", "api/snapshot"}
    for _ in range(600):
        if wanted <= set(requested) and held:
            everything.set()
            break
        page.wait_for_timeout(50)
    assert everything.is_set(), requested
    for route in held:
        route.continue_()
    page.unroute("**/static/**.js")
    expect(page.get_by_role("table", name="Queues")).to_be_visible()
    files = [name for name in requested if name.startswith("static/")]
    assert len(files) <= 3, files
    assert requested.count("api/me") == 1
