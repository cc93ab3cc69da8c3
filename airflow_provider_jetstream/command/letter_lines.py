"""A dead letter as a row, as text and as JSON."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.command.terminal_text import safe_line
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter

COLUMNS = ("SEQUENCE", "DIED (UTC)", "REASON", "CONSUMER", "SUBJECT", "JOB", "ERROR")
WIDTHS = (9, 14, 14, 12, 24, 20, 0)
_JOB_ID = 36


def letter_row(letter: DeadLetter) -> tuple[object, ...]:
    """Return the letter's columns."""
    death = letter.death
    text = death.error_message or death.explanation or ""
    error = f"{death.error_class}: {text}" if death.error_class else text
    return (
        letter.sequence,
        f"{death.died_at:%m-%d %H:%M:%S}",
        death.reason,
        f"{death.consumer} (absent)" if letter.consumer_absent and death.consumer else death.consumer or "",
        letter.subject,
        safe_line(letter.job_id, _JOB_ID),
        error,
    )


def letter_json(letter: DeadLetter, *, content: bool = False) -> dict[str, Any]:
    """Return the letter for a script.

    :param content: whether headers and body belong to it
    """
    death, origin = letter.death, letter.origin
    values = {
        "sequence": letter.sequence,
        "job_id": readable_text(letter.job_id),
        "subject": readable_text(letter.subject),
        "reason": death.reason.value,
        "consumer": death.consumer,
        "consumer_absent": letter.consumer_absent,
        "stored_at": letter.time,
        "died_at": death.died_at.isoformat(),
        "deliveries": death.deliveries,
        "error_class": _readable(death.error_class),
        "error_message": _readable(death.error_message or death.explanation),
        "error_place": _readable(death.error_place),
        "fingerprint": death.fingerprint,
        "traceback_digest": death.traceback_digest,
        "redrives": letter.redrives,
        "parked": _readable(letter.parked),
        "dag_id": _readable(origin.dag_id) if origin else None,
        "run_id": _readable(origin.run_id) if origin else None,
        "task_id": _readable(origin.task_id) if origin else None,
        "map_index": origin.map_index if origin else None,
        "bytes": len(letter.body),
    }
    if content:
        values["headers"] = [[readable_text(name), readable_text(value)] for name, value in letter.headers]
        values["body"] = _utf8(letter.body)
        values["body_base64"] = b64encode(letter.body).decode()
    return values


def letter_text(letter: DeadLetter) -> str:
    """Return the letter for people: its death, its headers, and its body as it is stored."""
    values = letter_json(letter)
    shown = {name: value for name, value in values.items() if value is not False and value not in (None, "")}
    lines = [f"{name}: {safe_line(value)}" for name, value in shown.items()]
    lines += ["", "headers:", *(f"  {safe_line(name)}: {safe_line(value)}" for name, value in letter.headers)]
    body = _utf8(letter.body)
    return "\n".join([*lines, "", "body:" if body is not None else "body, which isn't UTF-8:", _shown(letter.body)])


def _shown(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")


def _utf8(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _readable(text: str | None) -> str | None:
    return None if text is None else readable_text(text)
