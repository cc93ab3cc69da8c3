"""What the fields of streams and consumers mean for the jobs of a queue, where they aren't harmless.

:mod:`.server_fields` has every field and judges by these rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import PARTITIONS
from airflow_provider_jetstream.jetstream.queue.finding import Finding, Refusal, Restriction, Risk
from airflow_provider_jetstream.jetstream.queue.stream_config import eviction_limits, per_subject_limit, stored_subjects
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# A queue's stream, one of its companions, or a consumer from which its workers pull.
Kind: TypeAlias = Literal["queue", "dead_letters", "events", "archive", "audit", "schedules", "attempts", "consumer"]
# Who judges: provisioning, the lint, a worker that starts, and what reads the queue: scans, waits, redrives, diagnoses.
Use: TypeAlias = Literal["plan", "lint", "worker", "scan"]

LONG_ACK_WAIT: Final = 5 * 60 * NANOSECONDS
_LONG_WINDOW: Final = 10 * 60 * NANOSECONDS
_SHORT_WINDOW: Final = 60 * NANOSECONDS
_DEFAULT_MAX_WAITING: Final = 512
# Pull requests of workers with fallbacks, and of waits, last so long.
_SHORTEST_EXPIRES: Final = NANOSECONDS
_FULL: Final = 1.01
_GONE: Final = "its jobs wait for a new one, which would run its dead letters again"
_DURATIONS: Final = frozenset({"inactive_threshold", "subject_delete_marker_ttl"})

_ALL: Final[frozenset[Use]] = frozenset({"plan", "lint", "worker", "scan"})
_LINT: Final[frozenset[Use]] = frozenset({"lint"})
_NOTES: Final[frozenset[Use]] = frozenset({"plan", "lint", "worker"})
_SCAN: Final[frozenset[Use]] = frozenset({"scan"})


@dataclass(frozen=True, slots=True)
class Facts:
    """What the server reports of a stream or consumer.

    :param name: its name
    :param config: its configuration; a declared one where nothing is asked of the server
    :param info: the whole answer to STREAM.INFO or CONSUMER.INFO; ``config`` alone where only that is known
    :param queue: the name of the queue that it belongs to
    """

    name: str
    config: Mapping[str, Any]
    info: Mapping[str, Any]
    queue: str

    def get(self, field: str) -> Any:
        """Return the value of a field of the configuration; ``None`` for one that has no effect."""
        value = self.config.get(field)
        return None if value in (None, False, 0, -1, "", [], {}) else value

    @property
    def state(self) -> Mapping[str, Any]:
        """The stream's numbers; zeros where they aren't known."""
        return {"messages": 0, "bytes": 0, "consumer_count": 0, **(self.info.get("state") or {})}


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field means for one kind of stream or consumer.

    :param kind: what it is about
    :param field: its path in STREAM.INFO or CONSUMER.INFO
    :param name: of the findings, the same between releases
    :param effect: a refusal, a restriction or a risk
    :param example: a configuration to which the rule applies; an answer of the server where it has ``config``
    :param sentence: what is so, why, and what to do; ``None`` where the rule doesn't apply
    :param uses: who judges by it
    """

    kind: Kind
    field: str
    name: str
    effect: type[Finding]
    example: Mapping[str, Any]
    sentence: Callable[[Facts], str | None]
    uses: frozenset[Use] = _ALL

    def of_example(self) -> str:
        """Return the sentence about the example."""
        name = {"consumer": "w", "queue": "q"}.get(self.kind, f"q-{self.kind}")
        info = self.example if "config" in self.example else {"config": self.example}
        return self.sentence(Facts(name, info["config"], info, "q")) or ""


def _record_retention(facts: Facts) -> str | None:
    if (found := facts.config.get("retention", "limits")) == "limits":
        return None
    return (
        f"expected limits retention of {facts.name}, found {found}: it drops what it has acknowledged to store, so that"
        " jobs that are done would count as dead; create it with limits retention"
    )


def _queue_retention(facts: Facts) -> str | None:
    if (found := facts.config.get("retention", "workqueue")) == "workqueue":
        return None
    return (
        f"expected workqueue retention of {facts.name}, found {found}: a stream of another retention keeps jobs that"
        " are done, or drops jobs that aren't, so that dead ones can't be told from them; create it with workqueue"
        " retention (the server can't change it)"
    )


def _interest(facts: Facts) -> str | None:
    if facts.config.get("retention") != "interest":
        return None
    return (
        f"{facts.name} has interest retention and {facts.state['consumer_count']} consumers: it stores only entries"
        " that one of them takes, until they are acknowledged; otherwise terminated jobs go unseen, no body is stored,"
        " and no letter can be parked; give it limits retention"
    )


def _archive_retention(facts: Facts) -> str | None:
    if (found := facts.config.get("retention", "limits")) == "limits":
        return None
    return (
        f"{facts.name} has {found} retention: copies of jobs leave it as its consumers acknowledge them, and the bodies"
        " of terminated jobs with them; create it with limits retention"
    )


def _used(facts: Facts) -> dict[str, int]:
    return {"max_msgs": facts.state["messages"], "max_bytes": facts.state["bytes"]}


def _evicted_jobs(facts: Facts) -> str | None:
    if not (limits := eviction_limits(facts.config)):
        return None
    figures = ", ".join(f"{limit} {facts.config[limit]}, {_used(facts)[limit]} used" for limit in limits)
    return (
        f"{facts.name} drops its oldest jobs for new ones ({figures}): a redrive stores only as many copies as fit;"
        " declare discard new, so that publishers learn of it"
    )


def _discards_jobs(facts: Facts) -> str | None:
    if facts.config.get("discard") == "new" or not (
        eviction_limits(facts.config) or facts.config.get("max_msgs_per_subject", -1) > 0
    ):
        return None
    return (
        'discard "old" with a limit drops the oldest waiting jobs silently when the queue is full: use discard "new",'
        " which refuses new jobs instead"
    )


def _evicted_entries(limit: str) -> Callable[[Facts], str | None]:
    def sentence(facts: Facts) -> str | None:
        if limit not in eviction_limits(facts.config):
            return None
        return (
            f"{facts.name} drops its oldest entries for new ones ({limit} {facts.config[limit]},"
            f" {_used(facts)[limit]} used): terminated jobs and parked letters are lost with them; remove {limit}"
        )

    return sentence


def _full_entries(limit: str) -> Callable[[Facts], str | None]:
    def sentence(facts: Facts) -> str | None:
        filled = _used(facts)[limit] * (_FULL if limit == "max_bytes" else 1)
        if facts.config.get("discard") != "new" or not 0 < facts.config.get(limit, -1) <= filled:
            return None
        return f"{facts.name} is full and refuses what is new: deaths are found by counting only; raise {limit}"

    return sentence


def _evicted_records(facts: Facts) -> str | None:
    limits = [*eviction_limits(facts.config), *(["max_msgs_per_subject"] if per_subject_limit(facts.config) else [])]
    if not limits:
        return None
    return (
        f"{facts.name} drops its oldest records for new ones ({', '.join(limits)}): what a redrive that was cut off had"
        " begun is forgotten with them, and may run twice; remove the limit"
    )


def _per_subject_entries(facts: Facts) -> str | None:
    if (limit := facts.config.get("max_msgs_per_subject", -1)) <= 0:
        return None
    return (
        f"{facts.name} keeps {limit} entries of a subject, and the server reports all terminated jobs of a consumer on"
        f" one: any more of a consumer than {limit} go unseen; remove max_msgs_per_subject"
    )


def _per_subject_ends(facts: Facts) -> str | None:
    if not (limit := per_subject_limit(facts.config)):
        return None
    return (
        f"{facts.name} keeps {limit} messages of a subject, and the server reports all acknowledgements of a consumer"
        f" on one: waits don't learn of the ends of any more than {limit}; remove max_msgs_per_subject"
    )


def _per_subject_jobs(facts: Facts) -> str | None:
    if not (limit := per_subject_limit(facts.config)):
        return None
    return (
        f"{facts.name} keeps {limit} jobs of a subject and drops the oldest for new ones: a redrive stores only copies"
        " that drop no job"
    )


def _refuses_per_subject(facts: Facts) -> str | None:
    limit = facts.config.get("max_msgs_per_subject", -1)
    if not facts.get("discard_new_per_subject") or limit <= 0:
        return None
    return (
        f"{facts.name} refuses a job on a subject that has {limit} already (discard_new_per_subject), dead letters"
        " included: a redrive by copies is refused there, too; requeue in place, or remove the limit"
    )


def _expiring_entries(facts: Facts) -> str | None:
    if not (max_age := facts.get("max_age")):
        return None
    return (
        f"{facts.name} drops entries after {format_duration(max_age)}: terminated jobs that aren't redriven by then,"
        " and parked letters, are lost; remove max_age"
    )


def _expiring_jobs(facts: Facts) -> str | None:
    if not (max_age := facts.get("max_age")):
        return None
    return f"max_age {format_duration(max_age)} removes waiting jobs and dead letters of that age without an advisory"


def _window(facts: Facts) -> str | None:
    window = facts.get("duplicate_window")
    if window and window > _LONG_WINDOW:
        return (
            f"duplicate_window {format_duration(window)}: a job that is published again with its message id within that"
            " time isn't stored, even if the first one is done; give what shall run again another id"
        )
    if window and window < _SHORT_WINDOW:
        return (
            f"duplicate_window {format_duration(window)}: a publisher that repeats an unanswered request after that"
            " time stores the job twice; use the server's 2m"
        )
    return None


def copy_problem(config: Mapping[str, Any]) -> str:
    """Return a clause that says why no copy of a job can be stored in a queue; empty if one can.

    :param config: the queue's configuration on the server
    """
    name = config["name"]
    if config.get("mirror"):
        return f"{name} mirrors another stream and stores nothing else"
    if config.get("sources") and not config.get("subjects"):
        return f"{name} takes its jobs from other streams only and captures no subject"
    if config.get("no_ack"):
        return f"{name} acknowledges no message (no_ack), so whether a copy is stored can't be known"
    if config.get("sealed"):
        return f"{name} is sealed and stores no message any more"
    return ""


def _no_copies(field: str) -> Callable[[Facts], str | None]:
    """Return the rule's sentence for the field that is the first reason."""

    def sentence(facts: Facts) -> str | None:
        config = {"name": facts.name, **facts.config}
        if not facts.get(field) or not (problem := copy_problem(config)):
            return None
        # The other fields may be reasons, too: one sentence is enough.
        first = next(key for key in _COPY_FIELDS if facts.get(key) and copy_problem({**config, **_without(key)}))
        return f"{problem}: letters come back in place only" if first == field else None

    return sentence


_COPY_FIELDS: Final = ("mirror", "sources", "no_ack", "sealed")


def _without(field: str) -> dict[str, Any]:
    return {key: None for key in _COPY_FIELDS if key != field}


def _transforms(facts: Facts) -> str | None:
    if not (transform := facts.get("subject_transform")):
        return None
    return (
        f"{facts.name} stores jobs on other subjects than they are published on ({transform.get('src') or '>'} becomes"
        f" {transform.get('dest')}): consumers' filters have to match the stored ones, and a"
        " redrive stores no copy that the transform would move again"
    )


def _sourced(facts: Facts) -> str | None:
    if not (sources := facts.get("sources")):
        return None
    names = ", ".join(sorted({str(source.get("name")) for source in sources}))
    return (
        f"{facts.name} takes jobs from {names}: the archive may refuse their copies (nats-server 2.15 does), and with"
        " them the bodies of terminated jobs are lost; read them where they come from"
    )


def _purges(field: str, more: str = "", advice: str = "set it to false") -> Callable[[Facts], str | None]:
    def sentence(facts: Facts) -> str | None:
        if not facts.get(field):
            return None
        return (
            f"{facts.name} has {field}{more}: whoever may publish on one of its subjects may remove every job with the"
            f" header Nats-Rollup; {advice}"
        )

    return sentence


def _drops_schedules(field: str) -> Callable[[Facts], str | None]:
    def sentence(facts: Facts) -> str | None:
        if not facts.get(field):
            return None
        return (
            f"{facts.name} has {field}: schedules, and jobs that are due and not moved yet, may be dropped; remove it"
        )

    return sentence


def _many_of_an_attempt(facts: Facts) -> str | None:
    if facts.config.get("max_msgs_per_subject", 1) == 1:
        return None
    return (
        f"{facts.name} keeps every message about an attempt, up to one a second of each job: set max_msgs_per_subject"
        " to 1, with which the last one replaces the others"
    )


def _markers(facts: Facts) -> str | None:
    if not (age := facts.get("subject_delete_marker_ttl")):
        return None
    return (
        f"{facts.name} stores a marker where the last job of a subject expires (subject_delete_marker_ttl"
        f" {format_duration(age)}): workers of this package acknowledge markers, others run them as jobs without a"
        " body; set it to 0"
    )


def _own_age(facts: Facts) -> str | None:
    if not facts.get("allow_msg_ttl"):
        return None
    return (
        f"{facts.name} lets jobs bring their own age limit (Nats-TTL), which their copies in an archive have, too: one"
        " that expires while a worker has it is lost; have a max_age instead"
    )


def _given(field: str, text: str, default: str = "") -> Callable[[Facts], str | None]:
    """Return the sentence for a field that has another value than its default."""

    def sentence(facts: Facts) -> str | None:
        value = facts.get(field)
        if value is None or value == default:
            return None
        shown = format_duration(value) if isinstance(value, int) and field in _DURATIONS else value
        return text.format(name=facts.name, value=shown)

    return sentence


def _bodiless_archive(facts: Facts) -> str | None:
    if not (facts.get("republish") or {}).get("headers_only"):
        return None
    return (
        f"{facts.name} republishes headers only: the archive has no bodies, so that of a terminated job is lost; set"
        " republish.headers_only to false"
    )


def _partial_archive(facts: Facts) -> str | None:
    source = (facts.get("republish") or {}).get("src") or ">"
    missing = [subject for subject in stored_subjects(facts.config) if not covered_by_any([source], subject)]
    if not facts.get("republish") or not missing:
        return None
    return (
        f"{facts.name} republishes {source} only: jobs on {', '.join(missing)} have no copy in the archive; set"
        " republish.src to >"
    )


def _behind(facts: Facts) -> str | None:
    replicas = (facts.info.get("cluster") or {}).get("replicas") or ()
    behind = [replica for replica in replicas if not replica.get("current") or replica.get("offline")]
    if not behind:
        return None
    names = ", ".join(f"{replica.get('name')} ({replica.get('lag', 0)} behind)" for replica in behind)
    return (
        f"{facts.name} isn't copied to {names}: where its leader fails now, what isn't copied is lost, as right after"
        " num_replicas was raised; publish once every replica is current"
    )


def _failing_sources(facts: Facts) -> str | None:
    failing = [
        f"{source.get('name')} ({(source.get('error') or {}).get('description', 'no description')})"
        for source in [
            *(facts.info.get("sources") or ()),
            *([facts.info["mirror"]] if facts.info.get("mirror") else ()),
        ]
        if source.get("error")
    ]
    if not failing:
        return None
    return f"{facts.name} gets nothing from {', '.join(failing)}: jobs that wait there don't come; see the cause there"


def _lost_messages(facts: Facts) -> str | None:
    if not (lost := (facts.info.get("state") or {}).get("lost")):
        return None
    return (
        f"the server has lost {len(lost.get('msgs') or ()) or 'some'} messages of {facts.name}'s files: jobs that are"
        " gone without an end may be among them; compare with a backup"
    )


def _ack_policy(facts: Facts) -> str | None:
    if (policy := facts.config.get("ack_policy", "explicit")) == "explicit":
        return None
    harm = {
        "none": "a job counts as done when it is delivered",
        "all": "one acknowledgement ends all jobs that were delivered before it",
    }.get(policy, "workers' acknowledgements don't end their jobs one by one")
    return (
        f"consumer {facts.name} has ack_policy {policy}, expected explicit: {harm}; create it anew with explicit"
        " acknowledgements"
    )


def _deliver_policy(facts: Facts) -> str | None:
    if (policy := facts.config.get("deliver_policy", "all")) == "all":
        return None
    return (
        f"consumer {facts.name}: expected deliver_policy all, found {policy}: it never delivers the jobs that were"
        " stored before its start; create it anew with all"
    )


def _pushed(facts: Facts) -> str | None:
    if not (subject := facts.get("deliver_subject")):
        return None
    return (
        f"consumer {facts.name} (deliver_subject {subject}): it is a push consumer, from which no worker can pull, and"
        " an update can't change that (error 10012); remove it by hand if no job is in flight, or declare another name"
    )


def _long_wait(facts: Facts) -> str | None:
    backoff = facts.get("backoff")
    # The first backoff replaces the ack wait.
    field, wait = ("first backoff", backoff[0]) if backoff else ("ack_wait", facts.get("ack_wait"))
    if not wait or wait <= LONG_ACK_WAIT:
        return None
    return (
        f"consumer {facts.name}: {'a' if backoff else 'an'} {field} of {format_duration(wait)} delays the redelivery of"
        " a crashed worker's jobs by that time; use a shorter one and let workers report progress"
    )


def _endless(facts: Facts) -> str | None:
    if (facts.config.get("max_deliver") or -1) > 0:
        return None
    return f"consumer {facts.name} retries for ever (max_deliver -1): a poison job is run again and again"


def _no_backoff(facts: Facts) -> str | None:
    deliveries = facts.config.get("max_deliver") or -1
    if facts.get("backoff") or deliveries == 1:
        return None
    used_up = "runs again at once" if deliveries < 0 else "uses up its deliveries at once"
    return (
        f"consumer {facts.name} has no backoff: a job that a worker naks without a delay {used_up}; declare waits such"
        ' as ["1s", "5s", "30s"]'
    )


def _unlimited_pending(facts: Facts) -> str | None:
    limit = facts.config.get("max_ack_pending")
    if limit == -1:
        return (
            f"consumer {facts.name} has no limit of jobs in flight (max_ack_pending -1): one worker that pulls too many"
            " keeps them from all others for the ack wait"
        )
    return None


def _one_at_a_time(facts: Facts) -> str | None:
    if facts.config.get("max_ack_pending") != 1 or PARTITIONS in (facts.config.get("metadata") or {}):
        return None
    return (
        f"consumer {facts.name} has one job in flight at a time (max_ack_pending 1), whatever the number of its"
        " workers: declare partitions, each with an order of its own"
    )


def _few_waiting(facts: Facts) -> str | None:
    if not (most := facts.get("max_waiting")) or most >= _DEFAULT_MAX_WAITING:
        return None
    return (
        f"consumer {facts.name} takes {most} pull requests at a time (max_waiting), of all its workers together: the"
        f" server refuses any more; create it with {_DEFAULT_MAX_WAITING}"
    )


def _short_requests(facts: Facts) -> str | None:
    if not (longest := facts.get("max_expires")) or longest >= _SHORTEST_EXPIRES:
        return None
    return (
        f"consumer {facts.name} takes pull requests of at most {format_duration(longest)} (max_expires): the server"
        " refuses the requests of workers with fallbacks and of waits, which last 1s; set it to 1s or more"
    )


def _pinned(facts: Facts) -> str | None:
    if facts.config.get("priority_policy") != "pinned_client":
        return None
    return (
        f"consumer {facts.name} gives all its jobs to one worker (pinned_client), as only workers with state of their"
        " own need: keep the state outside, and let any worker do any job"
    )


def _pinned_worker(facts: Facts) -> str | None:
    if facts.config.get("priority_policy") != "pinned_client":
        return None
    return (
        f"expected consumer {facts.queue}/{facts.name} to share its jobs among workers, found the priority policy"
        " pinned_client: the server would give all jobs to one worker and leave the others idle; set priority_policy to"
        " overflow or prioritized, or do its jobs with a client that keeps pins"
    )


def _paused(facts: Facts) -> str | None:
    until = facts.get("pause_until")
    if not (facts.info.get("paused") if facts.info.get("ts") else until):
        return None
    return (
        f"consumer {facts.name} is paused{f' until {until}' if until else ''}: it delivers no job until then; resume it"
        " if that isn't wanted"
    )


def _ephemeral(facts: Facts) -> str | None:
    if facts.config.get("durable_name") or not facts.info.get("ts"):
        return None
    return (
        f"consumer {facts.name} isn't durable: the server removes it once nobody has pulled for its inactive_threshold,"
        f" and {_GONE}; create it with a durable_name"
    )


_PURGES: Final = ", with which the server allows roll-ups (allow_rollup_hdrs), too"
_FOR_GOOD: Final = (
    "the server can't switch it off (error 10052): let the queue run empty, remove it by hand, and provision it again,"
    " with schedules in a stream of their own"
)
_IN_MEMORY: Final = "{name} is in memory (storage): a restart of its server removes every job; create it with file"
_SEALED: Final = "{name} is sealed: it takes no job, and no update can unseal it; use another stream"
_COUNTS: Final = "{name} stores counters, not jobs (allow_msg_counter): use another stream"
_UNWRITTEN: Final = (
    "{name} acknowledges jobs before they are written (persist_mode {value}): a crash of its server loses published"
    " jobs; create it with the default"
)
_PACED: Final = (
    "consumer {name} delivers jobs at the pace at which they were stored (replay_policy {value}): a backlog takes as"
    " long again; create it with instant"
)
_BODILESS: Final = (
    "consumer {name} delivers jobs without their bodies (headers_only): workers would do them with nothing and"
    " acknowledge them; set it to false with the tool that set it (nats consumer edit --no-headers-only), then start"
    " workers again"
)
_BODILESS_JOBS: Final = (
    "consumer {name} delivers jobs without their bodies (headers_only): what workers of other makes do with them is"
    " done with nothing; set it to false, and see which jobs ended meanwhile"
)
_REMOVED: Final = (
    "consumer {name} has an inactive_threshold of {value}: the server removes it once nobody has pulled for so long,"
    f" and {_GONE}; declare 0"
)
_FORGOTTEN: Final = (
    f"consumer {{name}} is in memory (mem_storage): a restart of its server removes it, and {_GONE}; create it without"
    " that"
)

# Examples.
_LIMITS: Final = {"retention": "limits"}
_INTEREST: Final = {"retention": "interest"}
_FEW: Final = {"max_msgs": 5}
_SMALL: Final = {"max_bytes": 5}
_FULL_OF_MESSAGES: Final = {"config": {"max_msgs": 5, "discard": "new"}, "state": {"messages": 5}}
_FULL_OF_BYTES: Final = {"config": {"max_bytes": 5, "discard": "new"}, "state": {"bytes": 5}}
_ONE: Final = {"max_msgs_per_subject": 1}
_ONE_REFUSED: Final = {"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 1}
_AGE: Final = {"max_age": 86_400 * NANOSECONDS}
_WINDOW: Final = {"duplicate_window": 3_600 * NANOSECONDS}
_MIRROR: Final = {"mirror": {"name": "up"}}
_SOURCES: Final = {"sources": [{"name": "up"}]}
_MOVED: Final = {"subjects": ["q.jobs.>"], "subject_transform": {"src": "q.jobs.>", "dest": "q.stored.>"}}
_SOME: Final = {"subjects": ["q.jobs.>"], "republish": {"src": "q.jobs.a", "dest": "jobs.q.>"}}
_HEADERS: Final = {"republish": {"src": ">", "dest": "jobs.q.>", "headers_only": True}}
_MARKERS: Final = {"subject_delete_marker_ttl": NANOSECONDS}
_LOST: Final = {"config": {}, "state": {"lost": {"msgs": [7, 8], "bytes": 300}}}
_LAGGING: Final = {"config": {}, "cluster": {"replicas": [{"name": "n2", "current": False, "lag": 228}]}}
_FAILING: Final = {"config": {}, "sources": [{"name": "up", "error": {"description": "stream not found"}}]}
_SHORT: Final = {"max_expires": NANOSECONDS // 2}
_INACTIVE: Final = {"inactive_threshold": 5 * NANOSECONDS}
_PINNED: Final = {"priority_policy": "pinned_client"}
_UNTIL: Final = {"pause_until": "2030-01-01T00:00:00Z"}

RULES: Final = (
    Rule("queue", "config.retention", "retention", Refusal, _LIMITS, _queue_retention, _ALL - _LINT),
    Rule("events", "config.retention", "record-retention", Refusal, _INTEREST, _record_retention, _SCAN),
    Rule("audit", "config.retention", "record-retention", Refusal, _INTEREST, _record_retention, _SCAN),
    Rule("dead_letters", "config.retention", "dead-letter-interest", Restriction, _INTEREST, _interest, _SCAN),
    Rule("archive", "config.retention", "archive-retention", Risk, _INTEREST, _archive_retention, _SCAN),
    Rule("queue", "config.max_msgs", "evicts-jobs", Restriction, _FEW, _evicted_jobs, _SCAN),
    Rule("dead_letters", "config.max_msgs", "dead-letter-eviction", Risk, _FEW, _evicted_entries("max_msgs"), _SCAN),
    Rule(
        *("dead_letters", "config.max_msgs", "dead-letter-queue-full", Risk),
        *(_FULL_OF_MESSAGES, _full_entries("max_msgs"), _SCAN),
    ),
    Rule("audit", "config.max_msgs", "audit-eviction", Risk, _FEW, _evicted_records, _SCAN),
    Rule(
        "dead_letters", "config.max_bytes", "dead-letter-eviction", Risk, _SMALL, _evicted_entries("max_bytes"), _SCAN
    ),
    Rule(
        *("dead_letters", "config.max_bytes", "dead-letter-queue-full", Risk),
        *(_FULL_OF_BYTES, _full_entries("max_bytes"), _SCAN),
    ),
    Rule("queue", "config.max_age", "max-age", Risk, _AGE, _expiring_jobs, _LINT),
    Rule("dead_letters", "config.max_age", "dead-letter-age", Risk, _AGE, _expiring_entries, _SCAN),
    Rule(
        "queue", "config.max_msgs_per_subject", "evicts-jobs-of-a-subject", Restriction, _ONE, _per_subject_jobs, _SCAN
    ),
    Rule(
        *("dead_letters", "config.max_msgs_per_subject", "dead-letter-limit-per-subject", Risk),
        *(_ONE, _per_subject_entries, _SCAN),
    ),
    Rule("events", "config.max_msgs_per_subject", "events-limit-per-subject", Risk, _ONE, _per_subject_ends, _SCAN),
    Rule("queue", "config.discard", "discard-old", Risk, _FEW, _discards_jobs, _LINT),
    Rule(
        *("queue", "config.discard_new_per_subject", "refuses-copies-of-a-subject", Restriction),
        *(_ONE_REFUSED, _refuses_per_subject),
    ),
    Rule(
        *("queue", "config.storage", "memory-storage", Risk, {"storage": "memory"}),
        *(_given("storage", _IN_MEMORY, "file"), _LINT),
    ),
    Rule("queue", "config.no_ack", "no-copies", Restriction, {"no_ack": True}, _no_copies("no_ack")),
    Rule("queue", "config.duplicate_window", "duplicate-window", Risk, _WINDOW, _window, _LINT),
    Rule("queue", "config.mirror", "no-copies", Restriction, _MIRROR, _no_copies("mirror")),
    Rule("queue", "config.sources", "no-copies", Restriction, _SOURCES, _no_copies("sources")),
    Rule("queue", "config.sources", "sourced-jobs", Risk, _SOURCES, _sourced),
    Rule("queue", "config.subject_transform", "subject-transform", Risk, _MOVED, _transforms, _NOTES),
    Rule("queue", "config.republish.src", "archive-of-some-jobs", Risk, _SOME, _partial_archive),
    Rule("queue", "config.republish.headers_only", "archive-without-bodies", Risk, _HEADERS, _bodiless_archive),
    Rule("queue", "config.sealed", "sealed", Refusal, {"sealed": True}, _given("sealed", _SEALED), _ALL - _SCAN),
    Rule("queue", "config.sealed", "no-copies", Restriction, {"sealed": True}, _no_copies("sealed"), _SCAN),
    Rule(
        "queue", "config.allow_rollup_hdrs", "rollups", Risk, {"allow_rollup_hdrs": True}, _purges("allow_rollup_hdrs")
    ),
    Rule("queue", "config.allow_msg_ttl", "jobs-with-ttl", Risk, {"allow_msg_ttl": True}, _own_age),
    Rule("queue", "config.subject_delete_marker_ttl", "delete-markers", Risk, _MARKERS, _markers),
    Rule(
        *("queue", "config.allow_msg_counter", "counters", Refusal, {"allow_msg_counter": True}),
        _given("allow_msg_counter", _COUNTS),
    ),
    Rule(
        *("queue", "config.allow_msg_schedules", "schedules-in-queue", Risk, {"allow_msg_schedules": True}),
        _purges("allow_msg_schedules", _PURGES, _FOR_GOOD),
    ),
    Rule(
        *("queue", "config.persist_mode", "asynchronous-storage", Risk, {"persist_mode": "async"}),
        _given("persist_mode", _UNWRITTEN, "default"),
    ),
    Rule("queue", "state.lost", "lost-messages", Risk, _LOST, _lost_messages),
    Rule("queue", "cluster.replicas", "replicas-behind", Risk, _LAGGING, _behind),
    Rule("queue", "sources", "failing-source", Risk, _FAILING, _failing_sources),
    *(
        Rule("schedules", f"config.{field}", "drops-schedules", Risk, {field: value}, _drops_schedules(field))
        for field, value in {
            "max_age": 86_400 * NANOSECONDS,
            "max_msgs": 5,
            "max_bytes": 1000,
            "max_msgs_per_subject": 1,
            "max_msg_size": 100,
        }.items()
    ),
    Rule(
        *("attempts", "config.max_msgs_per_subject", "every-message-of-an-attempt", Risk),
        *({"max_msgs_per_subject": -1}, _many_of_an_attempt, _NOTES),
    ),
    Rule("consumer", "config.durable_name", "ephemeral-consumer", Risk, {"config": {}, "ts": "now"}, _ephemeral),
    Rule("consumer", "config.deliver_policy", "deliver-policy", Refusal, {"deliver_policy": "new"}, _deliver_policy),
    Rule("consumer", "config.ack_policy", "ack-policy", Refusal, {"ack_policy": "none"}, _ack_policy),
    Rule("consumer", "config.ack_wait", "long-ack-wait", Risk, {"ack_wait": 2 * LONG_ACK_WAIT}, _long_wait, _LINT),
    Rule("consumer", "config.max_deliver", "no-max-deliver", Risk, {"max_deliver": -1}, _endless, _LINT),
    Rule("consumer", "config.backoff", "no-backoff", Risk, {"max_deliver": 5}, _no_backoff, _LINT),
    Rule(
        *("consumer", "config.replay_policy", "original-pace", Risk, {"replay_policy": "original"}),
        _given("replay_policy", _PACED, "instant"),
    ),
    Rule("consumer", "config.max_waiting", "few-pull-requests", Risk, {"max_waiting": 1}, _few_waiting, _NOTES),
    Rule(
        *("consumer", "config.max_ack_pending", "unlimited-ack-pending", Risk),
        *({"max_ack_pending": -1}, _unlimited_pending, _LINT),
    ),
    Rule(
        "consumer", "config.max_ack_pending", "one-job-at-a-time", Risk, {"max_ack_pending": 1}, _one_at_a_time, _LINT
    ),
    Rule(
        *("consumer", "config.headers_only", "headers-only", Refusal, {"headers_only": True}),
        *(_given("headers_only", _BODILESS), _ALL - _SCAN),
    ),
    Rule(
        *("consumer", "config.headers_only", "headers-only", Risk, {"headers_only": True}),
        *(_given("headers_only", _BODILESS_JOBS), _SCAN),
    ),
    Rule("consumer", "config.max_expires", "short-pull-requests", Risk, _SHORT, _short_requests, _NOTES),
    Rule(
        *("consumer", "config.deliver_subject", "push-consumer", Refusal, {"deliver_subject": "d"}, _pushed),
        _ALL - _SCAN,
    ),
    Rule("consumer", "config.deliver_subject", "push-consumer", Restriction, {"deliver_subject": "d"}, _pushed, _SCAN),
    Rule(
        *("consumer", "config.inactive_threshold", "inactive-threshold", Risk, _INACTIVE),
        _given("inactive_threshold", _REMOVED),
    ),
    Rule(
        *("consumer", "config.mem_storage", "memory-consumer", Risk, {"mem_storage": True}),
        _given("mem_storage", _FORGOTTEN),
    ),
    Rule("consumer", "config.pause_until", "paused", Restriction, _UNTIL, _paused, _NOTES),
    Rule("consumer", "config.priority_policy", "stateful-workers", Risk, _PINNED, _pinned, _LINT),
    Rule(
        "consumer", "config.priority_policy", "pinned-consumer", Refusal, _PINNED, _pinned_worker, frozenset({"worker"})
    ),
)
