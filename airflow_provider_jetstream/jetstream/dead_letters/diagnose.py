"""Diagnoses a queue's dead letters: what they died of, whether that is still so, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers
from airflow_provider_jetstream.jetstream.dead_letters.cause_group import CauseGroups
from airflow_provider_jetstream.jetstream.dead_letters.recent_completions import read_recent_completions
from airflow_provider_jetstream.jetstream.dead_letters.recommendation import (
    Action,
    ConsumerActivity,
    Recommendation,
    recommend,
)
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.cause_group import CauseGroup
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_MOST_REPORTED = 10
_VALUES = 5
_ONE_PLACE = 0.8
_PAGE = 64


@dataclass(frozen=True, slots=True)
class DiagnosedGroup:
    """Dead letters of one cause, and what to do about them.

    :param share: their share of all the letters that were selected, from 0 to 1
    """

    letters: CauseGroup
    share: float
    recommendation: Recommendation

    def __str__(self) -> str:
        letters, advice = self.letters, self.recommendation
        began = f"began {letters.first:%Y-%m-%d %H:%M} UTC"
        return f"{letters.place}, {self.share:.0%}, {began}, {advice.cause}: {advice.text}"

    def as_json(self) -> dict[str, Any]:
        """Return the group for an XCom, the page or a script; of its values the most frequent five of each kind."""
        letters, advice = self.letters, self.recommendation
        subjects, subjects_left_out = letters.subjects.largest(_VALUES)
        tasks, tasks_left_out = letters.tasks.largest(_VALUES)
        releases, releases_left_out = letters.releases.largest(_VALUES)
        return {
            "count": letters.count,
            "share": round(self.share, 4),
            "first": letters.first.isoformat(),
            "last": letters.last.isoformat(),
            "reason": letters.reason.value,
            "consumer": letters.consumer,
            "error_class": letters.error_class,
            "error_message": letters.error_message,
            "error_place": letters.error_place,
            "example": letters.example,
            "select": dict(letters.select),
            "redriven": letters.redriven,
            "subjects": [{"subject": subject, "count": count} for subject, count in subjects],
            "subjects_left_out": subjects_left_out,
            "tasks": [{"dag_id": dag_id, "task_id": task_id, "count": count} for (dag_id, task_id), count in tasks],
            "tasks_left_out": tasks_left_out,
            "releases": [{"release": release, "count": count} for release, count in releases],
            "releases_left_out": releases_left_out,
            "cause": advice.cause.value,
            "action": advice.action.value,
            "advice": advice.text,
            "evidence": list(advice.evidence),
            "completed_since": advice.completed_since,
        }


@dataclass(frozen=True, slots=True)
class Diagnosis(TaskReport):
    """What a queue's dead letters died of.

    :param queue: the queue's name
    :param at: when this was so, by the server's clock
    :param dead: how many dead letters were selected
    :param uncertain: how many more jobs may be dead: letters that can't be identified yet
    :param groups: the letters by cause, the largest group first
    :param left_out: letters of causes that aren't among the groups, since there were too many causes
    :param risks: what could be lost with the queue as it is, and what isn't possible or known, a sentence each
    """

    queue: str
    at: datetime
    dead: int
    uncertain: int
    groups: tuple[DiagnosedGroup, ...]
    left_out: int
    risks: tuple[Finding, ...] = ()

    @property
    def action(self) -> Action:
        """What to do about the largest group."""
        return self.groups[0].recommendation.action if self.groups else Action.NOTHING

    @property
    def headline(self) -> str:
        """The diagnosis in one line, for a notification."""
        if not self.groups:
            unknown = f" are proved: {self.uncertain} jobs may be dead" if self.uncertain else ""
            return f"{self.queue}: no dead letters{unknown}"
        largest = self.groups[0]
        causes = "one cause" if largest.share >= _ONE_PLACE else f"the largest of {len(self.groups)} causes"
        if largest.letters.error_place:
            causes = causes.replace("cause", "place")
        return f"{self.queue}: {self.dead} dead letters, {causes}: {largest}"

    @property
    def text(self) -> str:
        """The diagnosis in some lines for people: what broke, an example of its error, what to do, and the evidence."""
        lines = [self.headline]
        for group in self.groups[:_VALUES]:
            lines += [f"- {group.letters.count} letters: {group}"]
            if error := group.letters.error_message:
                lines += [f"  - for example: {error}"]
            lines += [f"  - {evidence}" for evidence in group.recommendation.evidence]
        if others := self.dead - sum(group.letters.count for group in self.groups[:_VALUES]):
            lines.append(f"- {others} letters of other causes")
        if self.uncertain and self.groups:
            lines.append(f"- {self.uncertain} more jobs may be dead")
        lines += [f"- risk: {risk}" for risk in self.risks]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text

    def as_json(self, groups: int = _MOST_REPORTED) -> dict[str, Any]:
        """Return the diagnosis for an XCom, the page or a script.

        :param groups: how many of the largest groups it has
        """
        reported = self.groups[:groups]
        return {
            "queue": self.queue,
            "at": self.at.isoformat(),
            "dead": self.dead,
            "uncertain": self.uncertain,
            "action": self.action.value,
            "headline": self.headline,
            "text": self.text,
            "risks": [str(risk) for risk in self.risks],
            "groups": [group.as_json() for group in reported],
            "letters_left_out": self.dead - sum(group.letters.count for group in reported),
        }


async def diagnose_dead_letters(
    connection: Connection,
    queue: WorkQueue,
    selection: Selection | None = None,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> Diagnosis:
    """Find out what a queue's dead letters died of, whether that is still so, and what to do about it.

    It changes nothing and holds no letter in memory.

    :param selection: which dead letters; all in circulation where absent
    :param on_progress: called now and then with the number of letters that were read
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    :raises UnsuitableQueueError: its dead letters can't be told from other jobs
    """
    selection = selection or Selection()
    scan = await Scan.begin(connection, queue, unaccounted=selection.unaccounted)
    scan.page_size = _PAGE
    groups = CauseGroups()
    async for page in scan.pages(selection):
        for letter in page.letters:
            groups.add(letter)
        if on_progress:
            on_progress(groups.letters)
    snapshot, completions = scan.snapshot, None
    if groups.letters and (events := scan.context.events):
        completions = await read_recent_completions(connection, queue.name, snapshot.companions[events])
    activities = {
        name: ConsumerActivity.of(info) for name, info in (await list_consumers(connection, queue.name)).items()
    }
    diagnosed = tuple(
        DiagnosedGroup(
            group,
            group.count / groups.letters,
            recommend(group, completions, activities.get(group.consumer or ""), snapshot.taken_at),
        )
        for group in groups.largest()
    )
    return Diagnosis(
        queue.name, snapshot.taken_at, groups.letters, scan.uncertain, diagnosed, groups.left_out, scan.risks
    )
