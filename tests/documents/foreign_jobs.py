"""The programs of the stream ``jobs``: a publisher that awaits each answer, and a worker of one priority.

``foreign_jobs.py publish jobs.high.my_job_id 500`` and ``foreign_jobs.py work high 3``.
"""

import asyncio
import sys

from nats.aio.msg import Msg

from testbed.foreign_programs import acknowledge, attempt_of, connected, consume, record, sequence_of

STREAM = "jobs"
_BODY = b"x" * 128
# A job that can't be done: it is left unacknowledged, until its deliveries are used up.
_BAD = b"bad"


async def publish(subject: str, count: int) -> None:
    """Publish jobs, each acknowledged before the next one is sent."""
    async with connected() as client:
        jetstream = client.jetstream(timeout=10)
        for _ in range(count):
            await jetstream.publish(subject, _BODY)


async def work(priority: str, worker: str) -> None:
    """Process the jobs of one priority; the id is for the log only."""
    async with connected() as client:

        async def process(message: Msg) -> None:
            if message.data == _BAD:
                return
            record(worker=f"{priority}-{worker}", sequence=sequence_of(message), deliveries=attempt_of(message))
            await acknowledge(client, message)

        await consume(client, STREAM, priority, process, batch=100)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["publish", subject, count]:
            asyncio.run(publish(subject, int(count)))
        case ["work", priority, worker]:
            asyncio.run(work(priority, worker))
        case _:
            sys.exit(__doc__)
