"""What no face shows of scheduled jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from nats.js.errors import APIError

from airflow_provider_jetstream.jetstream.publishing.schedules import cron_problem
from testbed.queues import make_queue

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection


_NUMBERS = ["0", "7", "59", "60", "00", "31", "-1", "+5", "x", "1.5", "99999999999999999999", "٣"]


_FORMS = ["*", "?", "*/2", "*/100", "5/15", "1-3", "3-1", "1-5/2", "1-", "1/", "1/0", "1-2-3", "1/2/3", "1,2", "**"]


_WORDS = ["jan", "DEC", "feb-apr", "mon", "Sat", "fri-sun", "tue-thu/2", "monday", "L", "1W", "mon#1"]


_DATES = [
    "31 2 *",
    "30 feb *",
    "29 2 *",
    "31 4,6 *",
    "31 4,5 *",
    "31 2 ?",
    "31 2 mon",
    "30-31 2 *",
    "29-31 2 *",
    "*/31 2 *",
]


def _crons() -> list[str]:
    texts = [*_NUMBERS, *_FORMS, *_WORDS]
    alone = [["0"] * place + [text] + ["*"] * (5 - place) for place in range(6) for text in texts]
    return [" ".join(fields) for fields in alone] + [f"0 0 0 {date}" for date in _DATES]


@pytest.mark.since_server("2.14", "cron expressions")
async def test_a_cron_expression_is_refused_exactly_where_the_server_would_refuse_it(
    connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name, schedules=True)
    publish = connection.client.jetstream().publish
    valid = {cron: cron_problem(cron.split()) is None for cron in _crons()}
    codes: dict[str, int | None] = {}
    for number, cron in enumerate(valid):
        headers = {"Nats-Schedule": cron, "Nats-Schedule-Target": f"due.{name}.{name}.jobs.a"}
        try:
            await publish(f"scheduled.{name}.every.{number}", b"", headers=headers)
            codes[cron] = None
        except APIError as error:
            codes[cron] = error.err_code
    assert set(codes.values()) == {None, 10189}
    servers = {cron: code is None for cron, code in codes.items()}
    # The one form that only the server accepts.
    lenient = {cron for cron in servers if "+5" in cron.split()}
    assert {cron for cron in valid if valid[cron] != servers[cron]} <= lenient
    assert 50 < sum(servers.values()) < len(servers) - 50
