"""A queue in another account, over service imports: published to, awaited, read, diagnosed, redriven, discarded."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    RedriveRequest,
    Selection,
    WaitPolicy,
    connect,
    diagnose_dead_letters,
    find_dead_letters,
    preview,
    provision,
    publish,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.errors import ArgumentError, JetStreamProviderError, NotFoundError
from airflow_provider_jetstream.worker import GiveUpError, Worker
from testbed.code_blocks import code_blocks
from testbed.nats_binaries import nats_server_of
from testbed.nats_server import NatsServer
from testbed.queues import running_worker, stored_count, until_stored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream import WorkQueue
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection

PREFIX = "shop.api"


def page_names() -> dict[str, Any]:
    (block,) = (block for block in code_blocks() if block.page == "docs/accounts.md")
    names: dict[str, Any] = {}
    exec(compile(block.numbered_code, block.page, "exec"), names)
    return names


@asynccontextmanager
async def two_accounts(
    version: str | None = None,
) -> AsyncIterator[tuple[NatsPyConnection, NatsPyConnection, WorkQueue, ConnectionSettings]]:
    """Yield a connection in the queue's account, one in Airflow's, the queue, and settings of the queue's account."""
    names = page_names()
    exports, imports = ("\n".join(names[name]) for name in ("EXPORTS", "IMPORTS"))
    config = f"""accounts {{
      SHOP: {{ jetstream: enabled, users: [{{ user: shop, password: p }}], exports: [{exports}] }}
      AIRFLOW: {{ jetstream: enabled, users: [{{ user: airflow, password: p }}], imports: [{imports}] }}
    }}"""
    with NatsServer(config=config, binary=nats_server_of(version) if version else None) as server:
        shop = ConnectionSettings(servers=(server.url,), user="shop", password="p")
        airflow = ConnectionSettings(servers=(server.url,), user="airflow", password="p", api_prefix=PREFIX)
        async with connect(shop) as there, connect(airflow) as here:
            await provision(there, names["QUEUE"])
            yield there, here, names["QUEUE"], shop


@pytest.mark.parametrize("version", [None, pytest.param("2.12.8", marks=pytest.mark.slow), "2.10.27"])
async def test_a_queue_in_another_account_is_used_as_the_page_says(version: str | None) -> None:
    async with two_accounts(version) as (there, here, queue, settings):
        broken = True

        def handle(job: Delivery) -> None:
            if broken and job.body == b"bad":
                raise GiveUpError("no such order")

        cursor = await take_cursor(here, queue)
        report = await publish(here, queue, [b"good", b"bad", b"bad"], subject="orders.jobs.a")
        async with running_worker(Worker(queue, "worker", handle, settings)):
            waited = await wait(here, cursor, [*report.sequences], policy=WaitPolicy(max_dead=None))
            assert (len(waited.completed), len(waited.dead)) == (1, 2)
            letters = (await find_dead_letters(here, queue)).letters
            assert [(letter.sequence, letter.body) for letter in letters] == [(2, b"bad"), (3, b"bad")]
            (group,) = (await diagnose_dead_letters(here, queue)).groups
            assert group.letters.count == 2
            assert (await preview(here, queue, RedriveRequest())).redriven == 2
            one = RedriveRequest(Selection(sequences=[2]), discard=True, why="a test order")
            discarded = await redrive_dead_letters(here, queue, one)
            discarded.raise_for_failures()
            assert len(discarded.discarded) == 1
            broken = False
            redriven = await redrive_dead_letters(here, queue, RedriveRequest())
            redriven.raise_for_failures()
            assert list(redriven.redriven) == [3]
            await until_stored(there, "orders", 0)
            ends = await wait(here, cursor, [1, 3])
            assert (len(ends.completed), ends.dead) == (2, {})
        assert await stored_count(there, "orders-audit") > 0


async def test_a_queue_of_the_same_name_in_the_own_account_is_another_one() -> None:
    async with two_accounts() as (there, here, queue, settings):
        own = ConnectionSettings(servers=settings.servers, user="airflow", password="p")
        async with connect(own) as connection:
            with pytest.raises(NotFoundError):
                await find_dead_letters(connection, queue)
            await publish(here, queue, [b"a"], subject="orders.jobs.a")
        assert await stored_count(there, "orders") == 1


async def test_what_no_role_sends_is_not_imported() -> None:
    async with two_accounts() as (_, here, queue, _settings):
        with pytest.raises(JetStreamProviderError):
            await here.api(f"STREAM.DELETE.{queue.name}", {}, time_limit=1)


@pytest.mark.parametrize("prefix", ["$JS.API", "shop api", "shop.*", ""])
def test_a_prefix_that_can_not_be_one_is_refused(prefix: str) -> None:
    with pytest.raises(ArgumentError, match="expected a prefix of the API of SHOP"):
        page_names()["POLICY"].imports("SHOP", prefix)
