"""Handlers for tests of worker processes, which must be able to import them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from airflow_provider_jetstream.worker import GiveUpError, RetryLaterError

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery


class Order(BaseModel):
    """An order of the tests."""

    item: str
    amount: int = 1


class UnpicklableError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def process_id(job: Delivery) -> int:
    time.sleep(0.05)
    return os.getpid()


def typed(order: Order, job: Delivery) -> str:
    return f"{order.item} {order.amount} {job.attempt}"


def fail(job: Delivery) -> object:
    body = job.body.decode()
    if body == "give up":
        raise GiveUpError("no such order") from KeyError("order-7")
    if body == "unpicklable":
        raise UnpicklableError("one", "two")
    if body == "later" and job.attempt == 1:
        raise RetryLaterError("300ms")
    if body == "exit" and job.attempt == 1:
        raise SystemExit(3)
    if body == "killed" and job.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if body == "exits" and job.attempt == 1:
        os._exit(4)
    if body == "unsendable":
        return threading.Lock()
    return body


def hang_with_child_process(job: Delivery) -> None:
    if job.attempt > 1:
        return
    program = subprocess.Popen(["sleep", "60"])
    Path(job.headers["Folder"], "pids").write_text(f"{os.getpid()} {program.pid}")
    program.wait()


def raise_from_body(job: Delivery) -> None:
    """Raise an error as the body says: in which function, and with which text."""
    function, _, text = job.body.decode().partition(" ")
    if function == "feed":
        _feed(text)
    if function == "fold":
        _fold(text)
    try:
        _feed(text)
    except ValueError as error:
        raise GiveUpError(f"never {text}") from error


async def raise_from_body_async(job: Delivery) -> None:
    raise_from_body(job)


def _feed(text: str) -> None:
    raise ValueError(text)


def _fold(text: str) -> None:
    raise ValueError(text)


def progress_then_exit(job: Delivery) -> None:
    job.progress(0.5, "half")
    if job.attempt == 1:
        os._exit(3)
