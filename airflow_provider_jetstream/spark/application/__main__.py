"""The application's process: reads what it has to do from its standard input, and ends when that ends."""

from __future__ import annotations

import base64
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.spark.application.error_transport import error_message
from airflow_provider_jetstream.spark.application.messages import RESULT, MessageHandler, Messages
from airflow_provider_jetstream.spark.application.parent_watch import end_with_input, read_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def main() -> int:
    """Do what the task wants, and tell it how that ended.

    :return: the status for whoever started the process
    """
    messages = Messages.instead_of_output()
    handler = MessageHandler(messages)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, format="%(message)s")
    logging.getLogger("airflow_provider_jetstream").setLevel(logging.INFO)
    assignment = json.loads(read_line())
    end_with_input()
    try:
        from airflow_provider_jetstream.spark.application.progress import logged_stages
        from airflow_provider_jetstream.spark.application.session import running_session

        with (
            running_session(assignment["name"], assignment["master"], assignment["conf"]) as session,
            logged_stages(session.sparkContext),
        ):
            outcome = _outcome(session, assignment)
    except Exception as error:
        log.debug("Spark didn't start, or didn't stop", exc_info=True)
        outcome = error_message(error)
    messages.send(outcome)
    return 0 if RESULT in outcome else 1


def _outcome(session: SparkSession, assignment: Mapping[str, Any]) -> dict[str, Any]:
    from pyspark import cloudpickle

    from airflow_provider_jetstream.spark.application.commands import WORK

    try:
        function = assignment["function"] and cloudpickle.loads(base64.b64decode(assignment["function"]))
        return {RESULT: WORK[assignment["work"]](session, assignment["connection"], assignment["orders"], function)}
    except Exception as error:
        log.debug("The work failed", exc_info=True)
        # Here, since PySpark's errors ask the JVM for their text.
        return error_message(error)


if __name__ == "__main__":
    sys.exit(main())
