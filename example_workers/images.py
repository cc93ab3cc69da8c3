"""Turns images black and white, as the converters of the image pipeline do."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from PIL import Image

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery

log = logging.getLogger("images")

OUTPUT = "OUTDIR"


def convert(job: Delivery) -> dict[str, str]:
    """Convert one image.

    :param job: a request ``{"id": …, "image": "file:///…", "advisory": …}``
    :return: the request's id, which the completion carries
    :raises KeyError: the request names no image, or has no id
    :raises OSError: the image doesn't exist or can't be read
    """
    request = job.json()
    source = Path(unquote(urlparse(request["image"]).path))
    target = Path(os.environ[OUTPUT]) / f"{request['id']}{source.suffix}"
    with Image.open(source) as image:
        image.convert("1").save(target)
    log.info("converted %s into %s", source, target)
    return {"id": request["id"]}
