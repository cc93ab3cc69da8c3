"""Handlers that run in processes of their own, which have to be able to import them."""

from __future__ import annotations

import logging
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


class AwkwardError(Exception):
    """Can be written by pickle, but not read again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def process_id(job: Delivery) -> int:
    time.sleep(0.05)
    return os.getpid()


def typed(order: Order, job: Delivery) -> str:
    return f"{order.item} {order.amount} {job.attempt}"


def fail(job: Delivery) -> object:
    what = job.body.decode()
    if what == "give up":
        raise GiveUpError("no such order") from KeyError("order-7")
    if what == "awkward":
        raise AwkwardError("one", "two")
    if what == "later" and job.attempt == 1:
        raise RetryLaterError("300ms")
    if what == "exit" and job.attempt == 1:
        raise SystemExit(3)
    if what == "killed" and job.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exits" and job.attempt == 1:
        os._exit(4)
    if what == "unsendable":
        return threading.Lock()
    return what


def hang_with_a_program(job: Delivery) -> None:
    if job.attempt > 1:
        return
    program = subprocess.Popen(["sleep", "60"])
    Path(job.headers["Folder"], "pids").write_text(f"{os.getpid()} {program.pid}")
    program.wait()


def chatty(job: Delivery) -> None:
    logging.getLogger("shop").info("working on %s", job.id)


def stumble(job: Delivery) -> None:
    """Fail as the body says: where, and with which words."""
    where, _, words = job.body.decode().partition(" ")
    if where == "feed":
        _feed(words)
    if where == "fold":
        _fold(words)
    try:
        _feed(words)
    except ValueError as error:
        raise GiveUpError(f"never {words}") from error


async def stumble_async(job: Delivery) -> None:
    stumble(job)


def _feed(words: str) -> None:
    raise ValueError(words)


def _fold(words: str) -> None:
    raise ValueError(words)
