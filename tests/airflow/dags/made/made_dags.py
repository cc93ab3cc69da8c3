"""DAGs of Airflow that functions of another folder make; the queue's file is beside this file."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "makers"))
makers = import_module("makers_of_dags")

QUEUE = "queues/made.yaml"

every_kind = makers.make_every_kind("made_of_every_kind", QUEUE)
decorated_dag = makers.make_decorated(QUEUE)
makers.make_from_declaration(
    {
        f"made_of_a_declaration_{number}": {"send": {"work_queue": QUEUE, "subject": "made.a", "jobs": [number]}}
        for number in range(2)
    },
    globals(),
)
