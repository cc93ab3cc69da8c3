"""What is shown with every version: each case is a promise, and the tests that hold it."""

from collections.abc import Sequence
from dataclasses import dataclass

FLOW, ATTACK, FAULT = "main flow", "attack", "fault"


@dataclass(frozen=True)
class Case:
    """A promise and the files of its tests."""

    kind: str
    name: str
    expected: str
    files: tuple[str, ...]


def _server(kind: str, name: str, expected: str, modules: str) -> Case:
    return Case(kind, name, expected, tuple(f"tests/server/test_{module}.py" for module in modules.split()))


SERVER_CASES = (
    _server(
        FLOW,
        "connect",
        "each way to authenticate works in every part; what is wrong is named; TLS never falls back to plaintext",
        "connect authentication domains",
    ),
    _server(
        FLOW,
        "least privilege",
        "each role works under exactly its policy, and a missing line is named",
        "role_policies",
    ),
    _server(
        FLOW,
        "provision",
        "a declared queue is created, adopted or changed; drift is shown; what the server lacks is refused",
        "provisioning provisioning_adoption provisioning_archive provisioning_consumers provisioning_plans",
    ),
    _server(
        FLOW,
        "publish",
        "each job is stored once or reported; a retry sends what isn't stored",
        "publishing manifest job_identity_on_retry scheduled_jobs",
    ),
    _server(
        FLOW,
        "wait",
        "every end is seen, nothing is missed, nothing foreign is believed",
        "wait advisory_ends ack_metrics end_evidence handles comparison_of_waits drained",
    ),
    _server(
        FLOW,
        "work",
        "a worker does each job once, and stores its end before it acknowledges",
        "worker worker_retries worker_dead_lettering worker_deadlines worker_priorities priority_groups"
        " worker_stopping cancellation",
    ),
    _server(
        FLOW,
        "find dead letters",
        "every dead letter is found; what can't be proved is uncertain, never nothing",
        "dead_letters advisory_probe preconditions account classifier reconciliation archive body_preservation",
    ),
    _server(
        FLOW,
        "redrive",
        "each letter becomes one job, by every protocol that the server knows",
        "redrive redrive_in_place redrive_protocol redrive_order redrive_selection redrive_repair redrive_parking"
        " redrive_preview redrive_audit claims",
    ),
    _server(
        FLOW,
        "inspect",
        "health, overview and lint of running queues agree with the server",
        "inspection overview running_lint discovery",
    ),
    _server(
        FLOW,
        "events",
        "messages and deaths ring; a task takes each message once; what is withdrawn or away is waited for",
        "doorbell consume_operator letter_watch payload_mode payload_faults",
    ),
    _server(
        ATTACK,
        "hostile jobs and entries",
        "whatever a job, a header, an advisory or an entry holds, the next one is done",
        "hostile_jobs hostile_entries foreign_task_records wire_bytes",
    ),
    _server(
        ATTACK,
        "hostile servers",
        "garbage, endless lines and silence end in an error of the tree, within the limit",
        "hostile_servers connect_limits",
    ),
    _server(
        ATTACK,
        "denials",
        "a denial reaches its request at once, as a terminal error with subject and user",
        "denials",
    ),
    _server(
        FAULT,
        "server restarts",
        "restarts, kills and lame duck mode lose nothing",
        "server_restarts server_away connection_renewal leaderless stalls",
    ),
    _server(
        FAULT,
        "interrupted publishing and work",
        "each job is done once, whenever the connection ends",
        "publishing_faults worker_outages request_deadlines",
    ),
    _server(
        FAULT,
        "interrupted redrives",
        "a redrive that ends anywhere is finished by the next one, and repeats nothing",
        "redrive_faults redrive_cut_off redrive_recovery redrive_room redrivers_at_once lease",
    ),
    Case(
        FAULT,
        "killed processes",
        "publishers, workers, handlers and redrives killed at any call lose and repeat nothing",
        tuple(
            f"tests/faults/test_{module}.py"
            for module in ("kills", "cut_connections", "handler_kills", "publisher_kills", "order_kills")
        ),
    ),
    Case(
        FAULT,
        "killed leaders",
        "clusters whose leaders are killed lose nothing",
        ("tests/faults/test_cluster_faults.py", "tests/faults/test_waiting_faults.py"),
    ),
)

AIRFLOW_CASES = (
    Case(
        FLOW,
        "orders",
        "provision, publish, wait, sense, redrive and drain: no order lost, none run twice",
        ("tests/airflow/test_airflow_orders_dag.py",),
    ),
    Case(FLOW, "hook", "the hook's operations work in a task", ("tests/airflow/test_airflow_hook.py",)),
    Case(
        FLOW,
        "publish operator",
        "a deferred task waits for its jobs and reports how each ended",
        ("tests/airflow/test_airflow_publishing.py",),
    ),
    Case(
        FLOW,
        "sensors",
        "sensors, deferred or not, fire for dead letters and for a drained queue",
        ("tests/airflow/test_airflow_dead_letter_sensor.py", "tests/airflow/test_airflow_drained_sensor.py"),
    ),
    Case(
        FLOW,
        "redrive operator",
        "letters are redriven once, and awaited",
        ("tests/airflow/test_airflow_redrive_operator.py",),
    ),
    Case(
        FLOW,
        "events",
        "messages and deaths start runs, and each order is done once",
        ("tests/airflow/test_airflow_orders_by_event.py", "tests/airflow/test_airflow_dead_letter_watch.py"),
    ),
    Case(
        FLOW,
        "the page",
        "the monitor's routes answer under Airflow's permissions",
        ("tests/airflow/test_airflow_monitor.py",),
    ),
)

DEPENDENCY_CASES = (
    Case(FLOW, "without a server", "declarations, parsers, reports and command lines", ("tests/unit",)),
    _server(
        FLOW,
        "connect and publish",
        "each job is stored once or reported",
        "connect publishing publishing_faults stored_messages",
    ),
    _server(FLOW, "work and wait", "each job is done once, and its end is seen", "worker worker_retries wait"),
    _server(
        FLOW,
        "find and redrive dead letters",
        "every letter is found, and becomes one job",
        "dead_letters redrive redrive_recovery",
    ),
    _server(
        ATTACK,
        "hostile input",
        "ends in an error of the tree, and the next one is done",
        "hostile_jobs hostile_entries hostile_servers denials",
    ),
)


def files_of(cases: Sequence[Case]) -> list[str]:
    """Return the files of all cases, each once."""
    return list(dict.fromkeys(file for case in cases for file in case.files))
