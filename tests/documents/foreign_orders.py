"""The three programs of the order queue: the publisher, the consumer that fails, the handler of unprocessed orders.

``foreign_orders.py publish orders.new 20 1``, ``… process orders_stream 'orders.*'`` and
``… handle orders_unprocessed orders_stream``. A number after ``process`` starts the dice, so that a run can be
repeated.
"""

import asyncio
import json
import random
import sys

from nats.aio.msg import Msg

from testbed.foreign_programs import (
    acknowledge,
    attempt_of,
    connected,
    consume,
    create_or_update_consumer,
    get_message,
    record,
    sequence_of,
)

PROCESSOR = {
    "durable_name": "processor",
    "description": "Orders processor",
    "backoff": [5_000_000_000],
    "max_deliver": 2,
}
HANDLER = {
    "durable_name": "unprocessed_order_handler",
    "description": "handle unprocessed jobs",
    "backoff": [5_000_000_000],
    "max_deliver": 2,
}


async def publish(subject: str, count: int, pause: float) -> None:
    """Publish ``order-0``, ``order-1`` and so on, with a pause after each."""
    async with connected() as client:
        for number in range(count):
            await client.jetstream().publish(subject, f"order-{number}".encode())
            await asyncio.sleep(pause)


async def process(stream: str, filter_subject: str, dice: random.Random) -> None:
    """Process orders; each delivery fails with one half, and is then left unacknowledged."""
    async with connected() as client:
        await create_or_update_consumer(client, stream, PROCESSOR | {"filter_subject": filter_subject})

        async def attempt(message: Msg) -> None:
            order = message.data.decode()
            if dice.randrange(10) < 5:
                print("error processing", order, "delivery", attempt_of(message), flush=True)
                return
            record(processed=order, sequence=sequence_of(message))
            await asyncio.sleep(0.01)
            await acknowledge(client, message)

        await consume(client, stream, str(PROCESSOR["durable_name"]), attempt)


async def handle(letters: str, stream: str) -> None:
    """Handle unprocessed orders: read the advisory, get the order by its sequence, acknowledge the advisory.

    An order that can't be got ends the program.
    """
    async with connected() as client:
        await create_or_update_consumer(client, letters, HANDLER)

        async def reprocess(message: Msg) -> None:
            sequence = int(json.loads(message.data)["stream_seq"])
            order = await get_message(client, stream, sequence)
            if order is None:
                sys.exit(f"no message {sequence} in {stream}")
            record(handled=order.decode(), sequence=sequence)
            await acknowledge(client, message)

        await consume(client, letters, str(HANDLER["durable_name"]), reprocess)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["publish", subject, count, pause]:
            asyncio.run(publish(subject, int(count), float(pause)))
        case ["process", stream, filter_subject, *seed]:
            asyncio.run(process(stream, filter_subject, random.Random(*map(int, seed))))  # noqa: S311 - dice
        case ["handle", letters, stream]:
            asyncio.run(handle(letters, stream))
        case _:
            sys.exit(__doc__)
