"""The black-and-white converter of the image pipeline: core NATS requests, and an exit on any error.

It asks the consumer for one job at a time, with an empty request and a minute's patience; it publishes the job's id to
the advisory subject that the job names; it acknowledges by an empty answer. Pillow converts in place of ImageMagick.
"""

import asyncio
import json
import os
from pathlib import Path
from urllib.parse import unquote, urlparse

from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeoutError
from PIL import Image

from testbed.foreign_programs import connected, record

NEXT = "$JS.API.CONSUMER.MSG.NEXT.IMAGES.BW"


async def convert_next(client: Client, folder: Path) -> None:
    """Convert the next image, if one is to be converted within a minute."""
    try:
        # Not through the client's shared inbox: the job comes under its own subject, which that inbox doesn't know.
        message = await client.request(NEXT, b"", timeout=60, old_style=True)
    except NatsTimeoutError:
        return
    job = json.loads(message.data)
    convert(job, folder)
    if advisory := job.get("advisory"):
        await client.publish(advisory, json.dumps({"id": job["id"]}).encode())
    await client.publish(message.reply, b"")
    await client.flush()
    record(converted=job["id"])


def convert(job: dict[str, str], folder: Path) -> None:
    """Convert a job's image; the job ``{}`` names none, and opening it raises."""
    source = Path(unquote(urlparse(job.get("image", "")).path))
    with Image.open(source) as image:
        image.convert("1").save(folder / f"{job['id']}{source.suffix}")


async def main() -> None:
    """Convert images for ever."""
    folder = Path(os.environ["OUTDIR"])
    async with connected() as client:
        while True:
            await convert_next(client, folder)


if __name__ == "__main__":
    asyncio.run(main())
