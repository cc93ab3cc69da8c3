r"""Images that workers turn black and white: requests, a poison request, a letter read by its sequence, a redrive.

The DAG publishes a request for each image of a folder, and two that can't be done: ``{}``, which names no image, and
one for an image that isn't there yet. Workers know nothing of Airflow or of this package: they ask for one request with
core NATS, convert the image, publish the request's id to the advisory subject that the request names, and acknowledge.
They exit on any error, and their platform starts them again. One is in ``tests/documents/foreign_images.py``::

    while :; do OUTDIR=/tmp/images/output python tests/documents/foreign_images.py; done

This package's own worker does the same with ``example_workers.images:convert``. The end of each conversion is the
advisory of its own request, or the server's report of its acknowledgement.

Both requests that fail use up five deliveries and stay stored. ``read`` gets them by their sequences. The one whose
image has come meanwhile is redriven, within the 512 bytes that a message of the stream may have. The other one is
parked.
"""

from __future__ import annotations

import shutil
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, Param, get_current_context, task

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import get_message
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue

QUEUE = str(Path(__file__).parent / "queues" / "images.yaml")
POISON = b"{}"


def request_for(image: Path) -> dict[str, str]:
    """Make the request to convert an image; its id is the same at every try."""
    job_id = sha256(image.as_uri().encode()).hexdigest()[:32]
    return {"id": job_id, "image": image.as_uri(), "advisory": f"advisory.{job_id}"}


def image_conversion(
    dag_id: str = "image_conversion", *, convert_id: str = "convert", work_queue: str | WorkQueue = QUEUE
) -> DAG:
    """Make the DAG, under any name."""
    with DAG(
        dag_id,
        schedule=None,
        catchup=False,
        tags=["jetstream"],
        params={
            "input": Param("/tmp/images/input", type="string", description="folder of the images"),  # noqa: S108 - the document's
            "late": Param("late.jpg", type="string", description="image that comes late"),
        },
        doc_md=__doc__,
    ) as dag:
        provision = JetStreamProvisionOperator(task_id="provision", work_queue=work_queue)

        @task
        def requests() -> list[dict[str, str]]:
            """Make the requests: one for each image, the poison one, and one for an image that comes late."""
            params = get_current_context()["params"]
            folder = Path(params["input"])
            images = sorted(folder.iterdir())
            if folder / params["late"] in images:
                raise ValueError(f"expected {params['late']} to come later, found it in {folder}: remove it")
            return [*map(request_for, images), {}, request_for(folder / params["late"])]

        convert = JetStreamPublishOperator(
            task_id=convert_id,
            work_queue=work_queue,
            subject="IMAGES.blackandwhite",
            jobs=requests(),
            wait_for_completion=True,
            max_dead=2,
            wait_timeout=timedelta(minutes=10),
            deferrable=True,
        )

        sense = JetStreamDeadLetterSensor(
            task_id="sense", work_queue=work_queue, min_count=2, deferrable=True, poke_interval=2, timeout=300
        )

        @task
        def read(found: Any) -> dict[str, Any]:
            """Get each dead request by its sequence, as ``nats stream get IMAGES 121`` does."""
            hook, bodies = JetStreamHook(), {}
            for first, last in found["sequences"]:
                for sequence in range(first, last + 1):
                    if message := hook.blocking(get_message, "IMAGES", sequence):
                        bodies[sequence] = message.data
            return {
                "poison": [sequence for sequence, body in bodies.items() if body == POISON],
                "late": [sequence for sequence, body in bodies.items() if body != POISON],
                "bodies": {str(sequence): body.decode(errors="replace") for sequence, body in bodies.items()},
            }

        @task
        def upload() -> None:
            """Put the late image where its request expects it."""
            params = get_current_context()["params"]
            folder = Path(params["input"])
            first = next(path for path in sorted(folder.iterdir()) if path.name != params["late"])
            shutil.copy(first, folder / params["late"])

        redrive = JetStreamRedriveOperator(
            task_id="redrive",
            work_queue=work_queue,
            sequences="{{ ti.xcom_pull('read')['late'] }}",
            why="the image has come",
            wait_for_completion=True,
            wait_timeout=timedelta(minutes=10),
            deferrable=True,
        )

        park = JetStreamRedriveOperator(
            task_id="park",
            work_queue=work_queue,
            sequences="{{ ti.xcom_pull('read')['poison'] }}",
            max_redrives=0,
            why="it names no image",
        )

        dead = read(sense.output)
        provision >> convert >> sense
        dead >> upload() >> redrive
        dead >> park
    return dag


dag = image_conversion()
