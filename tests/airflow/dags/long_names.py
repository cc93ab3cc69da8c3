"""The example DAG ``image_conversion`` under names as long as they are in practice, with a shorter ack wait."""

from __future__ import annotations

from pathlib import Path

import yaml

# The folder of all DAGs is on the path of every process of Airflow that reads one.
from example_dags.image_conversion import QUEUE, image_conversion

DAG_ID = "media_platform__conversion_of_uploaded_images_for_print_2_de"
CONVERT_ID = "convert_the_images_of_all_editions_into_black_and_white_once"

queue = yaml.safe_load(Path(QUEUE).read_text())
queue["consumers"][0]["ack_wait"] = "1s"

dag = image_conversion(DAG_ID, convert_id=CONVERT_ID, work_queue=queue)
