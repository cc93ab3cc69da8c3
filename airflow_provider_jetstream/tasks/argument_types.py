"""The types of the arguments of operators and sensors, for type checkers and editors; nothing imports them at run time.

A constructor names its own arguments, where Airflow looks for those of ``default_args``. It takes those of its bases as
``Unpack[…Arguments]``; where arguments exclude each other, it is overloaded. ``partial`` takes ``…Options``, in which
nothing is required. What a template field takes may also be a template, or another task's result, an ``XComArg``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Required, TypeAlias, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
    from datetime import datetime, timedelta
    from pathlib import Path

    from airflow.sdk import DAG, AssetAccessControl, AssetWatcher, Context, TaskGroup, XComArg
    from airflow.sdk.definitions.retry_policy import RetryPolicy
    from airflow.sdk.types import WeightRuleParam

    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.publishing.job import JobIdSource
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
    from airflow_provider_jetstream.jetstream.redrive.repair import Transform
    from airflow_provider_jetstream.jetstream.redrive.request import Protocol, StopWhen
    from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
    from airflow_provider_jetstream.triggers.message_event import BodyForm

    _Callback: TypeAlias = Callable[[Context], None]
    _Callbacks: TypeAlias = Callable[[Context], None] | list[Callable[[Context], None]] | None

Queue: TypeAlias = "WorkQueue | Mapping[str, Any] | str | Path | XComArg"
Text: TypeAlias = "str | XComArg"
Count: TypeAlias = "int | str | XComArg"
Number: TypeAlias = "float | str | XComArg"
Flag: TypeAlias = "bool | str | XComArg"
Duration: TypeAlias = "timedelta | float | str | XComArg"
Jobs: TypeAlias = "Iterable[object] | Callable[..., Iterable[object]] | XComArg"
JobIds: TypeAlias = "str | int | Iterable[str | int] | XComArg"
Sequences: TypeAlias = "Sequence[int] | Sequence[Sequence[int]] | str | XComArg"
Selected: TypeAlias = "Selection | Mapping[str, Any] | str | XComArg"
Handle: TypeAlias = "JobsHandle | PublishReport | Mapping[str, Any] | str | XComArg"
Waves: TypeAlias = "Sequence[int | str] | str | XComArg"
StopRule: TypeAlias = "StopWhen | Mapping[str, Any] | float | str | XComArg"
Patch: TypeAlias = "JsonPatch | Sequence[Mapping[str, Any]] | str | XComArg"
Properties: TypeAlias = "Mapping[str, Any] | str | XComArg"
Returns: TypeAlias = "Literal['counts', 'jobs']"


class TaskOptions(TypedDict, total=False):
    """Arguments of Airflow's ``BaseOperator``, without the task's id."""

    owner: str
    email: str | Sequence[str] | None
    email_on_retry: bool
    email_on_failure: bool
    retries: int | None
    retry_delay: timedelta | float
    retry_exponential_backoff: float
    max_retry_delay: timedelta | float | None
    retry_policy: RetryPolicy | None
    start_date: datetime | None
    end_date: datetime | None
    depends_on_past: bool
    ignore_first_depends_on_past: bool
    wait_for_past_depends_before_skipping: bool
    wait_for_downstream: bool
    dag: DAG | None
    params: MutableMapping[str, Any] | None
    default_args: dict[str, Any] | None
    priority_weight: int
    weight_rule: WeightRuleParam
    queue: str
    pool: str | None
    pool_slots: int
    sla: timedelta | None
    execution_timeout: timedelta | None
    on_execute_callback: _Callback | Collection[_Callback] | None
    on_failure_callback: _Callbacks
    on_success_callback: _Callback | Collection[_Callback] | None
    on_retry_callback: _Callbacks
    on_skipped_callback: _Callback | Collection[_Callback] | None
    pre_execute: Callable[[Context], None] | None
    post_execute: Callable[[Context, Any], None] | None
    trigger_rule: str
    resources: dict[str, Any] | None
    run_as_user: str | None
    map_index_template: str | None
    max_active_tis_per_dag: int | None
    max_active_tis_per_dagrun: int | None
    executor: str | None
    executor_config: dict[str, Any] | None
    do_xcom_push: bool
    multiple_outputs: bool
    inlets: Any | None
    outlets: Any | None
    task_group: TaskGroup | None
    doc: str | None
    doc_md: str | None
    doc_json: str | None
    doc_yaml: str | None
    doc_rst: str | None
    task_display_name: str | None
    logger_name: str | None
    allow_nested_operators: bool
    render_template_as_native_obj: bool | None


class TaskArguments(TaskOptions, total=False):
    """Arguments of Airflow's ``BaseOperator``."""

    task_id: Required[str]


class SensorOptions(TaskOptions, total=False):
    """Arguments of Airflow's ``BaseSensorOperator``, without the task's id."""

    poke_interval: timedelta | float
    timeout: timedelta | float | None
    soft_fail: bool
    mode: Literal["poke", "reschedule"]
    exponential_backoff: bool
    max_wait: timedelta | float | None
    silent_fail: bool
    never_fail: bool


class SensorArguments(SensorOptions, total=False):
    """Arguments of Airflow's ``BaseSensorOperator``."""

    task_id: Required[str]


class PollingOptions(SensorOptions, total=False):
    """Arguments of sensors that poll a queue."""

    deferrable: bool
    nats_conn_id: str


class PollingArguments(PollingOptions, total=False):
    """The arguments of the base class, and the required ones."""

    task_id: Required[str]
    work_queue: Required[Queue]


class WaitOptions(TypedDict, total=False):
    """How a task waits for jobs."""

    cancel_on_kill: bool
    cancel_on_failure: bool
    reconcile: Duration
    on_stall: Text
    defer_after: Duration | None
    returns: Returns
    deferrable: bool
    nats_conn_id: str


class Tolerance(TypedDict, total=False):
    """Which ends of jobs a wait tolerates; not together with ``min_completed``."""

    max_dead: Count | None
    max_cancelled: Count | None
    max_unaccounted: Count | None


class PolicyOptions(Tolerance, total=False):
    """Both ways to say which ends a wait accepts."""

    min_completed: Count | None


class WaitArguments(TaskArguments, WaitOptions, PolicyOptions, total=False):
    """Arguments of :class:`~airflow_provider_jetstream.operators.job_waiting.JobWaitingOperator`."""


class JobMakingOptions(TaskOptions, WaitOptions, total=False):
    """Arguments of operators that make jobs and can wait for them."""

    wait_for_completion: bool
    wait_timeout: Duration


class JobMakingArguments(JobMakingOptions, PolicyOptions, total=False):
    """The arguments of the base class, and the required ones."""

    task_id: Required[str]
    work_queue: Required[Queue]


class PublishOptions(JobMakingOptions, total=False):
    """Arguments of the operator that publishes."""

    subject: Text | None
    rate: Number | None
    room_timeout: Duration | None
    idempotency_key: Text | None
    job_id: JobIdSource | None


class TolerantPublishOptions(PublishOptions, Tolerance, total=False):
    """The arguments of the base class, with what a wait tolerates."""


class JobsSensorOptions(SensorOptions, WaitOptions, total=False):
    """Arguments of the sensor of jobs."""


class TolerantJobsSensorOptions(JobsSensorOptions, Tolerance, total=False):
    """The arguments of the base class, with what the wait tolerates."""


class JobsSensorArguments(SensorOptions, WaitOptions, PolicyOptions, total=False):
    """All arguments of the sensor of jobs, with the required ones."""

    task_id: Required[str]


class ProvisionOptions(TaskOptions, total=False):
    """Arguments of the operator that provisions."""

    dry_run: bool
    drain: bool
    park_dead: bool
    nats_conn_id: str


class CancelOptions(TaskOptions, total=False):
    """Arguments of the operator that cancels, without the jobs."""

    why: Text | None
    nats_conn_id: str


class ConsumeOptions(TaskOptions, total=False):
    """Arguments of the operator that consumes."""

    batch: Count | None
    max_messages: Count | None
    wait_timeout: Duration
    deferrable: bool
    nats_conn_id: str


class ReportOptions(TaskOptions, total=False):
    """Arguments of the operator that reports on dead letters."""

    page_directory: Text | None
    select: Selected | None
    served_at: Text | None
    nats_conn_id: str
    spark_conn_id: str
    spark_conf: Properties | None


class DeadLetterSensorOptions(PollingOptions, total=False):
    """Arguments of the sensor of dead letters."""

    select: Selected | None
    min_count: Count
    older_than: Duration | None
    group_by: Iterable[GroupField]
    count_under_pause: Flag


class DrainedSensorOptions(PollingOptions, total=False):
    """Arguments of the sensor of drained queues."""

    consumers: Sequence[str] | Text | None
    nothing_dead: bool


class RedriveOptions(TaskOptions, total=False):
    """Arguments of every redrive."""

    select: Selected | None
    subject: Text | None
    rate: Number | None
    protocol: Protocol | Text
    max_redrives: Count | None
    why: Text | None
    lease_timeout: Duration | None
    dry_run: bool
    spark_conn_id: str
    wait_timeout: Duration
    deferrable: bool
    nats_conn_id: str


class PythonOptions(TypedDict, total=False):
    """Arguments of a redrive that Spark doesn't take."""

    sequences: Sequences | None
    transform: Transform | None
    count_under_pause: Flag
    target_queue: Queue | None
    order_key: Text | None
    patch: Patch | None
    group_by: Iterable[GroupField]


class SparkOptions(TypedDict, total=False):
    """Arguments of a redrive that only Spark takes."""

    repair: Callable[[Any], Any] | None
    letters: Text | None
    directory: Text | None
    spark_conf: Properties | None


class DiscardOptions(TypedDict, total=False):
    """Arguments of a discard, which makes no job to wait for."""

    discard: Flag
    without_copy: Flag
    undo: Text | None


class WaveOptions(TypedDict, total=False):
    """Arguments of waves, which await all jobs."""

    waves: Waves | None
    stop_when: StopRule | None


class RedriveWaitOptions(TypedDict, total=False):
    """How a redrive waits for its jobs."""

    cancel_on_kill: bool
    cancel_on_failure: bool
    reconcile: Duration
    on_stall: Text
    defer_after: Duration | None
    returns: Returns


class PythonRedrive(RedriveOptions, PythonOptions, WaveOptions, DiscardOptions, total=False):
    """A redrive in the task's own process that doesn't wait, or in waves."""


class AwaitedPythonRedrive(RedriveOptions, PythonOptions, RedriveWaitOptions, total=False):
    """A redrive in the task's own process that may wait for its jobs."""


class TolerantPythonRedrive(AwaitedPythonRedrive, Tolerance, total=False):
    """The arguments of the base class, with what the wait tolerates."""


class SparkRedrive(RedriveOptions, SparkOptions, WaveOptions, total=False):
    """A redrive with Spark that doesn't wait, or in waves."""


class AwaitedSparkRedrive(RedriveOptions, SparkOptions, RedriveWaitOptions, total=False):
    """A redrive with Spark that may wait for its jobs."""


class TolerantSparkRedrive(AwaitedSparkRedrive, Tolerance, total=False):
    """The arguments of the base class, with what the wait tolerates."""


class PartialRedrive(
    RedriveOptions,
    PythonOptions,
    SparkOptions,
    WaveOptions,
    DiscardOptions,
    RedriveWaitOptions,
    PolicyOptions,
    total=False,
):
    """All arguments of a redrive."""

    engine: Literal["python", "spark"]
    wait_for_completion: bool


class NamedRedriveArguments(PythonRedrive, total=False):
    """Arguments of the redrive of the DAG that people trigger."""

    task_id: Required[str]


class SparkRedriveArguments(JobMakingArguments, SparkOptions, total=False):
    """Arguments of an operator that may redrive with Spark."""

    engine: Literal["python", "spark"]
    spark_conn_id: str


class WavedRedriveArguments(SparkRedriveArguments, WaveOptions, total=False):
    """Arguments of a redrive, with waves."""


class PayloadArguments(TypedDict, total=False):
    """Arguments of :class:`~airflow_provider_jetstream.triggers.message_event.PayloadOptions`."""

    batch_size: int
    max_wait: timedelta | float | str
    body: BodyForm
    max_size: int | str


class PollingTriggerArguments(TypedDict):
    """Arguments of :class:`~airflow_provider_jetstream.triggers.polling.PollingTrigger`."""

    nats_conn_id: str
    work_queue: Mapping[str, Any]
    poll_interval: float
    deferred_at: float


class AssetOptions(TypedDict, total=False):
    """Arguments of Airflow's ``Asset``, without name and address."""

    group: str
    extra: dict[str, Any] | None
    watchers: list[AssetWatcher]
    access_control: AssetAccessControl
