"""Records in the audit what a redrive does to each letter."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, copied_from
from airflow_provider_jetstream.jetstream.errors import ApiError, LeaseLostError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.redrive.removal import RUN_AGAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.audit.records import Action, KeptLetter
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.redrive.redriven_job import RedrivenJob
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

_LONGEST_ID = 200
_LONGEST_TEXT = 200
_MOST_KNOWN = 1_000

# A letter with a new job, or a parked one, and the record of that.
Done: TypeAlias = "tuple[DeadLetter, LetterRecord]"


class LetterRecords:
    """Builds and stores the records of one redrive.

    :param request: what to do with the letters
    """

    def __init__(self, audit: AuditLog, request: RedriveRequest) -> None:
        self._audit = audit
        self._request = request
        # The wave whose letters are redriven, where the redrive has waves.
        self.wave: int | None = None
        self._known: dict[tuple[Any, ...], LetterRecord] = {}

    def record(
        self,
        letter: DeadLetter,
        action: Action,
        *,
        new_sequence: int | None,
        subject: str,
        changes: dict[str, Any] | None = None,
        new_stream: str | None = None,
        left_out: dict[str, str] | None = None,
        kept: KeptLetter | None = None,
    ) -> LetterRecord:
        """Build the record of one action on a letter.

        :param new_sequence: the sequence of the new job or of the parked letter
        :param subject: the new job's subject
        :param changes: what a transform changed
        :param new_stream: the stream of the new job, where it isn't the letter's own
        :param left_out: headers for which the new job had no room
        :param kept: what is kept of a discarded letter
        """
        return self._alike(letter, action, subject, new_stream).model_copy(
            update={
                "at": datetime.now(UTC),
                "sequence": letter.sequence,
                "new_sequence": new_sequence,
                # A worker's copy has the time as the worker rounded it.
                "stored_at": letter.time or None if letter.source != BodySource.COPY else None,
                "job_id": readable_text(letter.job_id)[:_LONGEST_ID],
                "copy_of": copied_from(letter),
                "died_at": letter.death.died_at,
                "changes": changes or None,
                "left_out": left_out or None,
                "kept": kept,
            }
        )

    def _alike(self, letter: DeadLetter, action: Action, subject: str, new_stream: str | None) -> LetterRecord:
        """Return the record of a letter as far as others have the same: most letters of a redrive are alike."""
        death, redrives = letter.death, letter.redrives + (action not in ("parked", "discarded"))
        error = death.error_class, death.error_message, death.explanation
        why = self._request.why_of(letter)
        key = action, subject, new_stream, redrives, self.wave, why, death.stream, death.consumer, death.reason, error
        if alike := self._known.get(key):
            return alike
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = alike = LetterRecord.model_construct(
            stream=death.stream,
            created=death.created,
            action=action,
            new_stream=new_stream,
            subject=readable_text(subject),
            consumer=death.consumer,
            redrives=redrives,
            reason=death.reason.value,
            fingerprint=death.fingerprint,
            error_class=_shown(death.error_class),
            error_message=_shown(death.error_message or death.explanation),
            why=why,
            who=self._request.who,
            run=self._request.run,
            wave=self.wave,
        )
        return alike

    def of_copy(self, job: RedrivenJob, sequence: int) -> LetterRecord:
        """Build the record of a letter whose new job was just stored."""
        return self.record(
            *(job.letter, "redriven"),
            new_sequence=sequence,
            subject=job.subject,
            changes=job.content.changes,
            new_stream=job.stream if job.stream != job.letter.death.stream else None,
            left_out=dict(job.left_out) or None,
        )

    def of_begun(self, letter: DeadLetter) -> LetterRecord:
        """Build the record of a letter whose new job an earlier redrive has stored."""
        # The subject that this request names may be one of another queue than the one that stores the new job.
        subject = letter.subject if self._request.target else self._request.subject or letter.subject
        sequence, stream = letter.copy_sequence or 0, letter.copy_stream
        return self.record(letter, "redriven", new_sequence=sequence, subject=subject, new_stream=stream)

    async def write(self, done: Sequence[Done]) -> dict[int, str]:
        """Store records; return by stream sequence why a record isn't known to be stored.

        :raises LeaseLostError: the operation doesn't have its lease any more
        """
        # A redrive that was cut off may have stored the record as well.
        begun = [letter.sequence for letter, _ in done if letter.copy_sequence is not None]
        failed: dict[int, Exception] = {}
        recorded: set[int] = set()
        for sequence, (answer,) in zip(begun, await map_concurrently(self._has_record, begun), strict=True):
            if isinstance(answer, Exception):
                failed[sequence] = answer
            elif answer:
                recorded.add(sequence)
        records = [record for _, record in done if record.sequence not in recorded and record.sequence not in failed]
        errors = await self._audit.write(records)
        failed |= {record.sequence: error for record, error in zip(records, errors, strict=True) if error}
        return {
            record.sequence: f"it is {record.action}, but that couldn't be recorded ({failed[record.sequence]});"
            f" {RUN_AGAIN}"
            for _, record in done
            if record.sequence in failed
        }

    async def write_requeued(self, letters: Sequence[DeadLetter]) -> None:
        """Record that letters are requeued in place, before they are.

        :raises RedriveError: that couldn't be recorded
        """
        records = [
            self.record(letter, "requeued", new_sequence=letter.sequence, subject=letter.subject) for letter in letters
        ]
        if error := next((error for error in await self._audit.write(records) if error), None):
            raise RedriveError(f"nothing was requeued, since that couldn't be recorded ({error}); {RUN_AGAIN}")

    async def _has_record(self, sequence: int) -> tuple[bool | ApiError | TransientError]:
        # In a tuple, since an error that is a result by itself would be raised for all letters.
        try:
            record = await self._audit.last_record(sequence)
        except LeaseLostError:
            raise
        except (ApiError, TransientError) as error:
            return (error,)
        return (record is not None and record.action != "handled",)


def _shown(text: str | None) -> str | None:
    return readable_text(text)[:_LONGEST_TEXT] if text else None
