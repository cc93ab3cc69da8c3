"""The DAG ``dead_letter_reprocess``: each kind of dead letter gets its treatment, and none is lost."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

from airflow_steps import ROOT, log_text, provisioned, running_workers, succeeded, wait_for

from airflow_provider_jetstream.jetstream import Selection, WorkQueue, find_dead_letters
from testbed.dead_letters import stream_messages
from testbed.ledger import read_ledger
from testbed.queues import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

DAG_ID = "dead_letter_reprocess"
QUEUE = ROOT / "example_dags" / "queues" / "store.yaml"
HANDLER = "example_workers.store:process"


def order(number: int, amount: Any, bank: str = "quick") -> bytes:
    return json.dumps({"id": number, "amount": amount, "bank": bank}).encode()


ORDERS = [
    *(order(number, number, "slow") for number in range(1, 5)),
    *(order(number, f"{number},50") for number in range(5, 8)),
    order(8, 8.5),
    b"no order",
    b"\xff",
    # It has no bank, an error without a treatment.
    json.dumps({"id": 9, "amount": 9}).encode(),
]


async def test_each_kind_is_redriven_repaired_or_parked_and_reported(
    airflow: Airflow, settings: ConnectionSettings, connection: NatsPyConnection, ledger: Path, tmp_path: Path
) -> None:
    queue = await provisioned(settings, WorkQueue.load(QUEUE))
    for body in ORDERS:
        await connection.client.jetstream().publish("store.orders.new", body)
    with running_workers(
        settings, HANDLER, queue=QUEUE, logs=tmp_path, count=2, concurrency=4, env={"STORE_LEDGER": str(ledger)}
    ):

        async def all_dead() -> bool:
            return len((await find_dead_letters(connection, queue)).letters) == len(ORDERS) - 1

        await eventually(all_dead, 60)
        airflow.wait_for_dags(DAG_ID)
        # Its schedule starts a run as soon as it is unpaused.
        (run,) = await asyncio.to_thread(wait_for, lambda: airflow.runs(DAG_ID), "the scheduled run")
        run_id = run["dag_run_id"]
        await asyncio.to_thread(succeeded, airflow, DAG_ID, run_id)
        await asyncio.to_thread(wait_for, lambda: len(read_ledger(ledger)) >= 8, "eight processed orders")

    report = airflow.xcom(DAG_ID, run_id, "report")
    assert {
        str(row["error_class"]).rpartition(".")[2]: (row["found"], row["treatment"]) for row in report["groups"]
    } == {
        "BankBusyError": (4, "redrive_busy"),
        "MalformedOrderError": (3, "repair_malformed"),
        "JSONDecodeError": (1, "park_poison"),
        "UnicodeDecodeError": (1, "park_poison"),
        "KeyError": (1, "none"),
    }
    assert report["done"] == {
        "redrive_busy": {"redriven": 4, "parked": 0},
        "repair_malformed": {"redriven": 3, "parked": 0},
        "park_poison": {"redriven": 0, "parked": 2},
    }
    log = log_text(airflow, DAG_ID, run_id, "report")
    assert re.search(r"max_deliveries +KeyError +1 +none", log)
    assert "park_poison: 0 redriven, 2 parked" in log

    amounts = {entry["id"]: entry["amount"] for entry in read_ledger(ledger)}
    assert amounts == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5.5, 6: 6.5, 7: 7.5, 8: 8.5}
    assert len(read_ledger(ledger)) == len(amounts)
    parked = (await find_dead_letters(connection, queue, Selection(parked=True))).letters
    assert {letter.body: letter.parked for letter in parked} == dict.fromkeys(
        (b"no order", b"\xff"), "no order; a person has to inspect it"
    )
    left = (await find_dead_letters(connection, queue)).letters
    assert [letter.body for letter in left] == [ORDERS[-1]]
    assert [message.data for message in await stream_messages(connection, queue.name)] == [ORDERS[-1]]
