"""Invalid input fails a task at once; its log says what was expected, what was found and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from airflow_steps import log_text, task_states

from testbed.ports import LOOPBACK

if TYPE_CHECKING:
    from testbed.airflow import Airflow
    from testbed.nats_server import NatsServer

# Task → a text in its log; {port} is that of the connection's server.
TERMINAL = {
    "nats_wrong_password": "JS102 connection 'nats_wrong_password': nats://{host}:{port} refused the credentials:"
    " expected valid ones, found user and password; check them",
    "nats_wrong_token": "refused the credentials: expected valid ones, found a token; check them",
    "nats_without_jetstream": "JS104 connection 'nats_without_jetstream' (nats://{host}:{bare_port}): expected"
    " JetStream, found a server or account without it: start nats-server with -js",
    "nats_without_tls": "JS103 connection 'nats_without_tls' (tls://{host}:{port}): expected a server that requires"
    " TLS, found one that talks plaintext; nothing was sent to it",
    "nats_secret_in_host": "JS101 connection 'nats_secret_in_host': expected addresses without credentials, found"
    " an @ in its host: give them as login and password, or as token",
    "nats_unknown_extra": "inbox_prefix, timeout, found tokn; remove or correct them",
    "nats_two_ways": "JS101 connection 'nats_two_ways': the NATS connection can't be used: settings:"
    " expected one of user and password, a token, an nkey seed, credentials, found user and password and a token: keep"
    " one",
    "overlapping_filters": "JS110 the declaration of work queue 'refusing' can't be used:\n  - the filters refusing.>"
    " (consumer all) and refusing.some (consumer some) overlap: in a work queue every job has one consumer; make them"
    " disjoint",
    "no_such_file": "/queues/absent.yaml' can't be used:\n  - expected a YAML file at this path, found: No such file or"
    " directory",
    "misspelt_field": "subject: no such field: check its spelling, it is JetStream's own name",
    "unknown_stream": "no stream captures refusing.one: provision the queue first, or check the subject",
    "unknown_stream_to_wait_for": "JS113 expected stream refusing on the server, found none: provision the queue first,"
    " or check the name",
    "no_events_to_wait_for": "expected events, so that completions are stored and can be waited for: declare them",
    "no_subject": "JS120 job 0 has no subject: set it on the job, or a default for all",
    "text_for_jobs": "JS120 expected jobs as a list or an iterator, found str: put a single job into a list",
    "nothing_for_jobs": "JS120 expected jobs as a list or an iterator, found NoneType: the task or function that makes"
    " them returned nothing; return a list, an empty one for no jobs",
    "unserialisable_job": "expected a body of bytes, text or JSON values, found dict: Object of type object is not JSON"
    " serializable; convert it before publishing",
    "text_for_a_rate": "JS120 expected a number for rate, found 'fast'",
    "nothing_for_a_key": "JS120 expected a value for idempotency_key, found that its template, or a part of it,"
    " rendered to nothing",
    "ds_for_a_key": "expected ds for the template '{{{{ ds }}}}', found that this run has none: it has no logical date,"
    " as runs of assets and runs that a person triggers without one; use dag_run.run_id, or dag_run.run_after",
    "no_date_in_a_key": "rendered to nothing, which would be the same for many runs: see why, or leave it out; it has"
    " no logical date, as runs of assets and runs that a person triggers without one; use dag_run.run_id",
    "ds_for_jobs": "JS120 expected ds for the parameter of the function <lambda> of jobs, found that this run has none",
    "ts_for_an_id": "expected ts_nodash for the template '{{{{ ts_nodash }}}}', found that this run has none",
    "interval_for_a_selection": "expected data_interval_start for the template '{{{{ data_interval_start }}}}', found",
    "cancel_of_unknown_stream": "JS113 expected stream refusing_events to capture cancelled.refusing.>, found",
    "cancel_without_ids": "JS120 job 0 has no id to cancel it by: give it one where it is published",
    "cancel_without_events": "expected events that capture cancelled.refusing.>, so that cancellations are stored",
    "reserved_header": "JS120 job 0 sets Nats-Msg-Id: headers starting with Nats- belong to the server",
    "sensor_of_unknown_stream": "JS113 expected stream refusing on the server, found none: provision the queue first,",
    "soft_sensor": "JS113 expected stream refusing on the server, found none: provision the queue first,",
    "soft_deferred_sensor": "JS113 expected stream refusing on the server, found none: provision the queue first,",
    "sensor_of_no_dead_letters": "expected dead_letters, which the scan reads: declare a dead letter queue",
    "drained_unknown_stream": "JS113 expected stream refusing on the server, found none: provision the queue first,",
    "drained_unknown_consumer": "JS113 expected consumer nobody of stream unlettered on the server, found worker: check"
    " the name, or provision the queue first",
    "drained_without_dead_letters": "expected dead_letters, which the scan reads: declare a dead letter queue",
    "redrive_of_unknown_stream": "JS113 expected stream refusing on the server, found none: provision the queue first,",
}
TRANSIENT = {
    "nats_unreachable": "UnreachableError: JS201 connection 'nats_unreachable': no NATS server reached at"
    " nats://{host}:{port}: ",
    # Airflow's own text: the connection may be defined before the retry.
    "nats_undefined": "The conn_id `nats_undefined` isn't defined",
}


@pytest.mark.parametrize("task_id", TERMINAL)
def test_a_terminal_error_fails_the_task_without_a_retry(
    airflow: Airflow, nats: NatsServer, bare_nats: NatsServer, refused: str, task_id: str
) -> None:
    log = log_text(airflow, "refusing", refused, task_id)
    assert TERMINAL[task_id].format(host=LOOPBACK, port=nats.port, bare_port=bare_nats.port) in log
    assert "AirflowFailException" in log
    assert task_states(airflow, "refusing", refused)[task_id] == "failed"


@pytest.mark.parametrize("task_id", TRANSIENT)
def test_a_transient_error_is_retried(
    airflow: Airflow, connections: dict[str, dict[str, object]], refused: str, task_id: str
) -> None:
    expected = TRANSIENT[task_id].format(host=LOOPBACK, port=connections["nats_unreachable"]["port"])
    assert expected in log_text(airflow, "refusing", refused, task_id)
    assert task_states(airflow, "refusing", refused)[task_id] == "up_for_retry"
