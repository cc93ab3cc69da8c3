"""Every field that the server reports of a stream and of a consumer, and what it does to the jobs of a queue.

Any tool may set them, whatever a declaration says. A field is harmless, named or refused: plan, lint, the start of a
worker, scans, waits, redrives and diagnoses judge by this table and its :mod:`.field_rules`. A field that isn't here is
named as unknown. ``docs/reference/server-fields.md`` is made of it.

Protocol: StreamConfig, StreamInfo, ConsumerConfig and ConsumerInfo of nats-server 2.15 (API level 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

from airflow_provider_jetstream.jetstream.queue.field_rules import RULES, Facts
from airflow_provider_jetstream.jetstream.queue.finding import Finding, Refusal, Risk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.queue.field_rules import Kind, Rule, Use

# A field that no update can change; one that can be set and not be reset.
Change = Literal["", "fixed", "once"]


# Compared by identity: the tables are looked up by their fields for each scan.
@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A field of the server's API.

    :param path: its name in STREAM.INFO or CONSUMER.INFO, with dots for what is inside another
    :param means: what it does
    :param level: the API level that brought it; 0 for nats-server 2.10
    :param change: whether an update can change it
    :param unit: of its number
    """

    path: str
    means: str
    level: int = 0
    change: Change = ""
    unit: Literal["", "duration", "limit"] = ""


_SOURCE: Final = (
    Field("name", "that stream"),
    Field("opt_start_seq", "where the copy began"),
    Field("opt_start_time", "where the copy began"),
    Field("filter_subject", "what is taken over; part of the subjects that are stored"),
    Field("subject_transforms", "what is taken over; part of the subjects that are stored"),
    Field("subject_transforms.src", "what is taken over"),
    Field("subject_transforms.dest", "on which subject"),
    Field("external", "that stream's account or domain"),
    Field("external.api", "its API"),
    Field("external.deliver", "where it delivers"),
)
_DURABLE_SOURCE: Final = (
    Field("consumer", "the durable consumer that takes over", 4),
    Field("consumer.name", "its name", 4),
    Field("consumer.deliver_subject", "where it delivers", 4),
)
_SOURCE_INFO: Final = (
    Field("name", "that stream"),
    Field("lag", "how far behind it is"),
    Field("active", "how long ago it was heard of"),
    *_SOURCE[3:],
    Field("error", "why nothing comes"),
    Field("error.code", "its status"),
    Field("error.err_code", "its code"),
    Field("error.description", "as text"),
)
_CLUSTER: Final = (
    Field("cluster", "where it is stored"),
    Field("cluster.name", "the cluster"),
    Field("cluster.raft_group", "its group"),
    Field("cluster.leader", "the server that leads it"),
    Field("cluster.leader_since", "since when", 2),
    Field("cluster.system_account", "whose traffic it is", 2),
    Field("cluster.traffic_account", "whose traffic it is", 2),
    Field("cluster.desired", "where it is to be stored", 5),
    Field("cluster.replicas", "the other servers that store it"),
    Field("cluster.replicas.name", "the server"),
    Field("cluster.replicas.current", "whether it has caught up"),
    Field("cluster.replicas.offline", "whether it is away"),
    Field("cluster.replicas.active", "how long ago it was heard of"),
    Field("cluster.replicas.lag", "how many operations it is behind"),
    Field("cluster.replicas.peer", "its id"),
    Field("cluster.replicas.pending", "whether it is about to join"),
)


def _inside(path: str, fields: Iterable[Field]) -> Iterator[Field]:
    for field in fields:
        yield Field(f"{path}.{field.path}", field.means, field.level, field.change, field.unit)


_STREAM_CONFIG: Final = (
    Field("name", "its name"),
    Field("description", "text for people"),
    Field("subjects", "what it captures; filters are compared with what it stores"),
    Field("retention", "when a message leaves it", change="fixed"),
    Field("max_consumers", "how many consumers it may have; a plan counts them", unit="limit"),
    Field("max_msgs", "messages at most", unit="limit"),
    Field("max_bytes", "bytes at most; of a queue, drops and refuses as max_msgs does", unit="limit"),
    Field("max_age", "how long a message is stored", unit="duration"),
    Field("max_msgs_per_subject", "messages of each subject at most", unit="limit"),
    Field("max_msg_size", "bytes of a message at most; the lint compares it with copies of jobs", unit="limit"),
    Field("discard", "what is dropped where it is full"),
    Field("discard_new_per_subject", "whether max_msgs_per_subject refuses new messages"),
    Field("storage", "where messages are stored", change="fixed"),
    Field("num_replicas", "how many servers store it; see cluster.replicas for the time after it was raised"),
    Field("no_ack", "whether publishers get no acknowledgement"),
    Field("duplicate_window", "how long message ids are remembered", unit="duration"),
    Field("placement", "which servers store it"),
    Field("placement.cluster", "the cluster of these servers"),
    Field("placement.tags", "tags of these servers"),
    Field("placement.preferred", "the server that leads it"),
    Field("mirror", "the stream of which it is a copy"),
    *_inside("mirror", (*_SOURCE, *_DURABLE_SOURCE)),
    Field("sources", "the streams from which it takes messages"),
    *_inside("sources", (*_SOURCE, *_DURABLE_SOURCE)),
    Field("compression", "how its files are compressed"),
    Field("first_seq", "its first sequence"),
    Field("subject_transform", "on which subjects it stores what it captures"),
    Field("subject_transform.src", "which of them"),
    Field("subject_transform.dest", "the subjects that are stored"),
    Field("republish", "where copies of stored messages go: to the archive, or of entries to the audit"),
    Field("republish.src", "which messages are copied"),
    Field("republish.dest", "the subjects of the copies; a plan refuses another than the archive's"),
    Field("republish.headers_only", "whether copies have no body"),
    Field("allow_direct", "whether any of its servers answers reads; without it they take more requests"),
    Field("mirror_direct", "whether mirrors answer reads, too; what decides is read from the leader"),
    Field("sealed", "whether it takes no message and removes none"),
    Field("deny_delete", "whether messages can't be deleted; acknowledgements still remove them", change="once"),
    Field("deny_purge", "whether it can't be purged", change="once"),
    Field("allow_rollup_hdrs", "whether a message may replace those before it"),
    Field("consumer_limits", "what consumers may have"),
    Field(
        "consumer_limits.inactive_threshold",
        "what consumers without one of their own get, where it is judged",
        unit="duration",
    ),
    Field("consumer_limits.max_ack_pending", "their largest max_ack_pending; a plan compares it"),
    Field("allow_msg_ttl", "whether a message may bring its own age limit", 1),
    Field(
        "subject_delete_marker_ttl",
        "how long a marker is stored for a subject whose last message expired",
        1,
        unit="duration",
    ),
    Field("allow_msg_counter", "whether messages are counters", 2, "fixed"),
    Field("allow_atomic", "whether messages may be stored in batches, all or none", 2),
    Field("allow_msg_schedules", "whether messages may be scheduled", 2, "once"),
    Field("persist_mode", "when a message is written to the disk", 2, "fixed"),
    Field("allow_batched", "whether messages may be published in fast batches", 4),
    Field("metadata", "names and values for programs; provisioning notes the filters of consumers there"),
)

STREAM_FIELDS: Final = (
    Field("type", "of the answer"),
    Field("total", "how many subjects the answer is about"),
    Field("offset", "of the answer's page"),
    Field("limit", "of the answer's page"),
    Field("config", "its configuration"),
    *_inside("config", _STREAM_CONFIG),
    Field("created", "when it was created; another one of its name has other jobs"),
    Field("ts", "when the answer was made"),
    Field("domain", "the JetStream domain"),
    Field("state", "its numbers"),
    Field("state.messages", "stored messages"),
    Field("state.bytes", "their bytes"),
    Field("state.first_seq", "the first sequence"),
    Field("state.first_ts", "when that was stored"),
    Field("state.last_seq", "the last sequence"),
    Field("state.last_ts", "when that was stored"),
    Field("state.num_subjects", "how many subjects are stored"),
    Field("state.subjects", "messages by subject"),
    Field("state.num_deleted", "gaps among the sequences"),
    Field("state.deleted", "these gaps"),
    Field("state.lost", "messages that the server can't read from its files any more"),
    Field("state.consumer_count", "how many consumers it has"),
    *_CLUSTER,
    Field("mirror", "how the copy of another stream goes on"),
    *_inside("mirror", _SOURCE_INFO),
    Field("sources", "how taking messages from other streams goes on"),
    *_inside("sources", _SOURCE_INFO),
    Field("alternates", "mirrors of it"),
    Field("alternates.name", "a mirror"),
    Field("alternates.domain", "its domain"),
    Field("alternates.cluster", "its cluster"),
)

_CONSUMER_CONFIG: Final = (
    Field("durable_name", "its name, if it stays without workers"),
    Field("name", "its name"),
    Field("description", "text for people"),
    Field("deliver_policy", "where it begins", change="fixed"),
    Field("opt_start_seq", "where it begins, with another deliver_policy than all", change="fixed"),
    Field("opt_start_time", "where it begins, with another deliver_policy than all", change="fixed"),
    Field("ack_policy", "what ends a job", change="fixed"),
    Field("ack_wait", "how long a worker may be silent", unit="duration"),
    Field("max_deliver", "deliveries of a job at most"),
    Field("backoff", "waits between deliveries"),
    Field("filter_subject", "which jobs it delivers; compared with the subjects that are stored"),
    Field("filter_subjects", "which jobs it delivers; compared with the subjects that are stored"),
    Field("replay_policy", "how fast it delivers", change="fixed"),
    Field("rate_limit_bps", "how fast a push consumer delivers: see deliver_subject"),
    Field("sample_freq", "the share of acknowledgements that the server reports; the lint says where waits need it"),
    Field("max_waiting", "pull requests at a time", change="fixed"),
    Field("max_ack_pending", "jobs in flight at most"),
    Field("flow_control", "of a push consumer: see deliver_subject", change="fixed"),
    Field("headers_only", "whether deliveries have no body"),
    Field("max_batch", "jobs of a pull request at most; workers keep to it"),
    Field("max_expires", "how long a pull request lasts at most", unit="duration"),
    Field("max_bytes", "bytes of a pull request at most, where it names any"),
    Field("deliver_subject", "where a push consumer delivers", change="fixed"),
    Field("deliver_group", "the queue group of a push consumer: see deliver_subject"),
    Field("idle_heartbeat", "of a push consumer: see deliver_subject", change="fixed"),
    Field("inactive_threshold", "after how long without a pull the server removes it", unit="duration"),
    Field("num_replicas", "how many servers keep its state: as many as store the queue"),
    Field("mem_storage", "whether its state is in memory", change="fixed"),
    Field("direct", "whether it is the server's own; such a consumer is no worker's", change="fixed"),
    Field("sourcing", "whether it is another stream's; such a consumer is no worker's", 4, "fixed"),
    Field("metadata", "names and values for programs"),
    Field("pause_until", "until when it delivers nothing", 1),
    Field("priority_groups", "groups of pull requests; workers name the first", 1),
    Field("priority_policy", "how it chooses among pull requests", 1),
    Field("priority_timeout", "how long a client stays pinned", 1, unit="duration"),
)

CONSUMER_FIELDS: Final = (
    Field("type", "of the answer"),
    Field("stream_name", "its stream"),
    Field("name", "its name"),
    Field("created", "when it was created; another one of its name delivers every stored job"),
    Field("config", "its configuration"),
    *_inside("config", _CONSUMER_CONFIG),
    Field("delivered", "how far it has delivered"),
    Field("delivered.consumer_seq", "deliveries"),
    Field("delivered.stream_seq", "the last sequence"),
    Field("delivered.last_active", "when"),
    Field("ack_floor", "up to where all is acknowledged"),
    Field("ack_floor.consumer_seq", "deliveries"),
    Field("ack_floor.stream_seq", "the sequence"),
    Field("ack_floor.last_active", "when"),
    Field("num_ack_pending", "deliveries that haven't ended"),
    Field("num_redelivered", "deliveries of jobs that were delivered before"),
    Field("num_waiting", "open pull requests"),
    Field("num_pending", "jobs that it has yet to deliver"),
    *_CLUSTER,
    Field("push_bound", "whether somebody subscribes to a push consumer"),
    Field("paused", "whether it is paused; scans say which jobs are uncertain for that", 1),
    Field("pause_remaining", "for how long", 1, unit="duration"),
    Field("priority_groups", "the state of its groups", 1),
    Field("priority_groups.group", "a group", 1),
    Field("priority_groups.pinned_client_id", "its pinned client", 1),
    Field("priority_groups.pinned_ts", "since when", 1),
    Field("ts", "when the answer was made"),
)


def field_findings(
    kind: Kind, info: Mapping[str, Any], use: Use, *, name: str = "", queue: str = ""
) -> tuple[Finding, ...]:
    """Return what the fields of a stream or consumer mean for the jobs of a queue.

    :param kind: what it is
    :param info: the server's STREAM.INFO or CONSUMER.INFO; ``config`` alone where only that is known
    :param use: what it is judged for
    :param name: its name, where that isn't in the configuration
    :param queue: the queue that it belongs to
    """
    config = info["config"]
    facts = Facts(name or config.get("name") or config.get("durable_name") or "?", config, info, queue)
    found = [
        rule.effect(rule.name, sentence)
        for rule in RULES
        if rule.kind == kind and use in rule.uses and (sentence := rule.sentence(facts))
    ]
    what = "consumer " if kind == "consumer" else ""
    found += [
        Risk(
            "unknown-field",
            f"{what}{facts.name} has {field}, which this version of the package doesn't know: what it does to jobs"
            " isn't known; remove it, or use a version that knows it",
        )
        for field in unknown_fields(_table(kind), {"config": config})
    ]
    return tuple(found)


def refusals(findings: Iterable[Finding]) -> list[str]:
    """Return the findings that refuse, as text."""
    return [str(finding) for finding in findings if isinstance(finding, Refusal)]


def unknown_fields(table: tuple[Field, ...], reported: Mapping[str, Any], *, unset: bool = False) -> list[str]:
    """Return the fields that a table lacks.

    :param reported: the server's JSON
    :param unset: whether those without a value count, too
    """
    return sorted(set(_unknown(_paths(table), reported, "", unset=unset)))


def config_fields(kind: Kind, **values: object) -> dict[str, Field]:
    """Return the fields of a configuration with some attributes, by name, such as ``unit="duration"``."""
    fields = {field.path.removeprefix("config."): field for field in _table(kind) if field.path.startswith("config.")}
    return {
        name: field
        for name, field in fields.items()
        if all(getattr(field, key) == value for key, value in values.items())
    }


def field_rules(table: tuple[Field, ...], path: str) -> tuple[Rule, ...]:
    """Return the rules of a field."""
    return tuple(rule for rule in RULES if rule.field == path and _table(rule.kind) is table)


def _table(kind: Kind) -> tuple[Field, ...]:
    return CONSUMER_FIELDS if kind == "consumer" else STREAM_FIELDS


@cache
def _paths(table: tuple[Field, ...]) -> dict[str, bool]:
    """Return the paths of a table, and whether it has fields inside of them."""
    paths = [field.path for field in table]
    outer = {path.rpartition(".")[0] for path in paths}
    return {path: path in outer for path in paths}


def _unknown(known: Mapping[str, bool], reported: Mapping[str, Any], inside: str, *, unset: bool) -> Iterator[str]:
    for name, value in reported.items():
        path = f"{inside}{name}"
        if path not in known:
            if unset or value not in (None, False, 0, "", [], {}):
                yield path
        elif known[path]:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, dict):
                    yield from _unknown(known, part, f"{path}.", unset=unset)
