"""How the page is loaded, and what it draws of times that nobody sampled."""

from __future__ import annotations

import json
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


def test_a_time_that_nobody_sampled_is_a_gap_in_the_chart(browsing: Browsing, settings: ConnectionSettings) -> None:
    blocking(with_connection(settings, make_queue, "gaps"))
    page = browsing.open("static/icon.svg")

    def with_gap(route: Route) -> None:
        answer = route.fetch()
        detail = answer.json()
        before = [(minute, 100) for minute in range(10)]
        after = [(minute, 300) for minute in range(50, 60)]
        detail["history"] = [
            {
                "at": f"2026-01-01T00:{minute:02}:00Z",
                "pending": pending,
                "in_flight": 0,
                "dead": 0,
                "in_per_second": None,
                "out_per_second": None,
            }
            for minute, pending in [*before, *after]
        ]
        route.fulfill(response=answer, body=json.dumps(detail))

    page.route("**/api/queues/nats_default/gaps", with_gap)
    page.goto(f"{browsing.url}/jetstream/#/queues/nats_default/gaps")
    chart = page.locator(".trend").filter(has_text="Jobs").locator("canvas")
    expect(chart).to_be_visible()
    # Pixels of the line's colour in each tenth of the chart.
    drawn = """canvas => {
        const probe = document.createElement("i");
        probe.style.color = "var(--line)";
        document.body.append(probe);
        const one = new OffscreenCanvas(1, 1).getContext("2d");
        one.fillStyle = getComputedStyle(probe).color;
        probe.remove();
        one.fillRect(0, 0, 1, 1);
        const [r, g, b] = one.getImageData(0, 0, 1, 1).data;
        const {width, height} = canvas;
        const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
        const counts = Array(10).fill(0);
        for (let at = 0; at < data.length; at += 4) {
            const x = (at / 4) % width;
            const near = Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b);
            if (data[at + 3] > 200 && near < 40) counts[Math.floor((x / width) * 10)] += 1;
        }
        return counts;
    }"""
    page.wait_for_function(f"() => ({drawn})(document.querySelector('.trend canvas')).some(count => count > 20)")
    counts = chart.evaluate(drawn)
    assert sum(counts[:3]) > 20
    assert sum(counts[8:]) > 20
    assert sum(counts[4:7]) == 0, counts
