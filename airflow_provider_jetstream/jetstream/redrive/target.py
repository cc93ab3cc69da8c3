"""The queue that gets new jobs of a redrive: the letters' own, or another one that fulfils the same preconditions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.intent import Target
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.dead_letters.selection import NotKept
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError, RedriveError, RedriveRequestError
from airflow_provider_jetstream.jetstream.queue.preconditions import queue_findings, require_no_refusal
from airflow_provider_jetstream.jetstream.queue.snapshot import take_snapshot
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import BY_POLICY

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest


@dataclass(frozen=True, slots=True)
class RedriveTarget:
    """The queue that gets the new jobs.

    :param queue: its declaration
    :param snapshot: its stream, companions and consumers
    :param is_other: whether it isn't the letters' own
    :param risks: what its preconditions say where it is another one
    """

    queue: WorkQueue
    snapshot: QueueSnapshot
    is_other: bool = False
    risks: tuple[Finding, ...] = ()

    @property
    def stream(self) -> str:
        """The stream that stores the new jobs."""
        return self.snapshot.queue

    @property
    def other_snapshot(self) -> QueueSnapshot | None:
        """Its snapshot where it is another queue than the letters' own."""
        return self.snapshot if self.is_other else None

    def for_intent(self, last: int) -> Target:
        """Return what an intent says about the stream that is about to store new jobs.

        :param last: a sequence that the stream has reached
        """
        archive = self.queue.archive
        return Target(
            stream=self.stream,
            created=self.snapshot.created,
            last=last,
            archive=archive.name if archive and archive.name in self.snapshot.companions else None,
        )

    def check_subject(self, repaired: str | None, subject: str) -> None:
        """Raise unless a letter can become a job of a subject.

        :param repaired: the subject that its repair names, if it names one
        :param subject: the subject otherwise
        :raises RedriveError: the queue wouldn't store the subject, or no consumer matches one that isn't the letter's
        """
        # A letter's own subject may have lost its consumer only for now.
        if repaired is None and not self.is_other:
            problem = _capture_problem(subject, self.snapshot, is_other=False)
        else:
            problem = subject_problem(repaired or subject, self.snapshot, is_other=self.is_other)
        if problem:
            raise RedriveError(f"{problem}; the letter is untouched")


def subject_problem(subject: str, snapshot: QueueSnapshot, *, is_other: bool) -> str:
    """Return a sentence that says why a subject of a queue can't have jobs; empty if it can.

    :param is_other: whether the queue isn't the letters' own
    """
    if problem := _capture_problem(subject, snapshot, is_other=is_other):
        return problem
    if snapshot.consumer_for(subject) is None:
        return (
            f"expected a subject that a consumer of {snapshot.queue} takes, found {subject}: no worker would get the"
            " jobs"
        )
    return ""


def _capture_problem(subject: str, snapshot: QueueSnapshot, *, is_other: bool) -> str:
    """Return a sentence that says why the queue wouldn't store a message on a subject; empty if it would."""
    subjects, transform = snapshot.config.get("subjects") or [], snapshot.config.get("subject_transform") or {}
    if not covered_by_any(subjects, subject):
        advice = (
            "name one in the request, or in each repair"
            if is_other
            else "a dead letter comes back as a job of the same queue unless the request names a target"
        )
        return f"expected a subject of {snapshot.queue} ({', '.join(subjects)}), found {subject}: {advice}"
    if transform and covered_by_any([transform.get("src") or ">"], subject):
        return (
            f"expected a subject that {snapshot.queue} stores as it is, found {subject}: it would store the copy as"
            f" {transform.get('dest')} (subject_transform)"
            + ("; name another target" if is_other else ", once more; redrive all letters in place")
        )
    return ""


def own_queue(scan: Scan) -> RedriveTarget:
    """Return the letters' own queue as the target."""
    return RedriveTarget(scan.queue, scan.snapshot)


async def read_target(connection: Connection, request: RedriveRequest, scan: Scan) -> RedriveTarget:
    """Return the queue that gets the new jobs, which fulfils the preconditions.

    :raises RedriveRequestError: it is a companion of the letters' queue
    :raises UnsuitableQueueError: it is no work queue
    :raises NotFoundError: it doesn't exist
    """
    target = request.target
    if target is None or target.name == scan.queue.name:
        return own_queue(scan)
    if target.name in scan.queue.companion_names():
        raise RedriveRequestError(
            f"expected another work queue as target, found {target.name}, which belongs to {scan.queue.name}: name a"
            " queue with workers of its own"
        )
    snapshot = await take_snapshot(connection, target)
    findings = queue_findings(snapshot, target)
    require_no_refusal(target.name, findings)
    return RedriveTarget(target, snapshot, is_other=True, risks=findings)


def own_request(request: RedriveRequest, queue: WorkQueue) -> RedriveRequest:
    """Return a request that names no target where the target is the letters' own queue, and a policy's letters.

    :raises QueueDeclarationError: the request applies a policy that the queue doesn't declare
    """
    if request.discard == BY_POLICY and request.selection == NotKept():
        keep = require_dead_letters(queue).keep
        if keep is None:
            problem = "expected dead_letters.keep, found none: declare it, and name the queue's file; no server has it"
            raise QueueDeclarationError(queue.name, [problem])
        policy = f"by policy: {keep.describe()}"
        why = f"{policy}; {request.why}" if request.why else policy
        return replace(request, selection=NotKept(keep=keep), why=why)
    if request.target is None or request.target.name != queue.name:
        return request
    return replace(request, target=None)
