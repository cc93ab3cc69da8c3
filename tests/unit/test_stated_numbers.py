# ruff: noqa: SLF001 - What a page states is mostly a private constant.
"""Numbers that the how-to pages state are those of the code: limits, defaults, intervals."""

from __future__ import annotations

import re
from inspect import signature

import pytest

from airflow_provider_jetstream.assets import stream_asset
from airflow_provider_jetstream.command import exporter_command
from airflow_provider_jetstream.jetstream import documents, publication
from airflow_provider_jetstream.jetstream.audit import lease
from airflow_provider_jetstream.jetstream.inspection import drained, samples
from airflow_provider_jetstream.jetstream.publishing import outbox
from airflow_provider_jetstream.jetstream.redrive import (
    in_place,
    json_patch,
    operation,
    preview,
    protocol,
    request,
    steps,
)
from airflow_provider_jetstream.jetstream.waiting import (
    comparison,
    handle,
    job_reports,
    policy,
    wait,
)
from airflow_provider_jetstream.plugins.monitor import (
    scanner,
)
from airflow_provider_jetstream.provider_info import get_provider_info
from airflow_provider_jetstream.tasks import job_reports as task_reports
from airflow_provider_jetstream.triggers import (
    dead_letter,
    message,
    message_event,
    message_producer,
)
from airflow_provider_jetstream.worker import bounded_run, worker
from testbed.code_blocks import ROOT

_KIB, _MIB = 2**10, 2**20
_PAYLOAD = message_event.PayloadOptions()
_WINDOW = signature(outbox.Outbox).parameters["window"].default

_WORDS = {0.5: "half a", 1: "a", 3: "three", 5: "five", 10: "ten", 100: "a hundred", 2_000: "two thousand"}


def _word(number: float) -> str:
    return _WORDS.get(number, f"{number:,g}")


# By page, what it says, with the number of the code in its place.
STATED = {
    "command-line": [
        f"looks at the server every {exporter_command._INTERVAL:g} seconds",
        f"--port {exporter_command._PORT} --interval {exporter_command._INTERVAL:g}",
    ],
    "publishing": [
        f"about {_WINDOW:,} are read ahead, and at most {_WINDOW:,} or {outbox._MAX_BYTES // _MIB} MiB are on",
        f"or {outbox._MAX_FAILURES:,} have failed",
        f"again after {outbox._FIRST_PAUSE:g} s, and after twice as long",
        f"of the up to {_WINDOW:,} jobs that were sent already",
        f"nearly full, up to {_WINDOW:,} at once",
        f"takes it up to {publication._ENDED_SECONDS:g} seconds",
    ],
    "waiting": [
        f"up to {comparison._MAX_CANDIDATES} jobs of those that aren't delivered yet are read",
        f"every {comparison.INTERVAL:g} seconds, for as long as any task waits",
        f"after `reconcile` ({policy.RECONCILE_SECONDS / 60:g} minutes)",
        f"({comparison._BRIEF_PAUSE / 10**9:g} seconds), such as those of a count under a pause",
        f"for at least {wait.SHORTEST:g} seconds, and for up to {wait.LONGEST:g} while",
        f"More than {handle._MAX_RANGES} ranges of sequences are stored as a [document]",
        f"the first {task_reports._MAX_RANGES['sequences']} ranges, and",
        f"and the first {task_reports._MAX_RANGES_OF_A_STATE} of each state",
        f"up to {wait.RESULTS_BYTES // _KIB} KiB in total",
        f"what the handler returned, up to {job_reports.MAX_RESULT_BYTES // _KIB} KiB",
        f"up to {job_reports.DOCUMENT_JOBS} jobs and {job_reports.DOCUMENT_BYTES // _KIB} KiB the reports are in",
        f"in parts of up to {job_reports._PART_REPORTS:,} reports and {documents.PART_BYTES // _KIB} KiB",
        f"the first {job_reports._FIRST_FAILURES} jobs that didn't complete",
    ],
    "draining": [
        f"with the {_word(drained._NAMED)} largest `undeliverable_subjects`",
        f"twice, {_word(drained.PAUSE)} second apart",
    ],
    "redrive": [
        f"changes the queue's letters; default {request.LEASE_TIMEOUT:g}",
        f"(default {request.DIED_AGAIN:.0%})".replace("%", " %"),
        f"A patch has at most {json_patch.MOST_OPERATIONS} operations and {json_patch.LONGEST_PATCH // _KIB} KiB",
        f"larger than {json_patch.LARGEST_BODY // _MIB} MiB or deeper than {json_patch.MOST_LEVELS} levels",
        f"the difference of the first {_word(preview._SAMPLE)} letters",
        f"It lasts {lease.LEASE_SECONDS:g} seconds (or {_word(lease.TIME_LIMITS)} times",
        f"Entries are removed {_word(steps.ENTRIES_AT_ONCE)} at a time",
        f"updated every {_word(operation.PROGRESS_SECONDS)} seconds",
        *(f"**{point}**" for points in protocol.KILL_POINTS.values() for point in points),
        f"more than {in_place._LATE_SECONDS:g} s beyond its time limit of {in_place._RESET_SECONDS:g} s",
    ],
    "events": [
        f"at least `interval` seconds (default {message.DEFAULT_INTERVAL:g})",
        f"up to {_word(message.LONGEST_INTERVAL / 60)} minutes",
        f"again every {_word(message._REPEAT_PROBLEM / 60)} minutes",
        f"of ids and ranges of sequences the first {bounded_run._NAMED}",
        f"requested at once; default {_PAYLOAD.batch_size}",
        f"default {_PAYLOAD.max_wait:g} s, at most {message_event._LONGEST_WAIT:g} s",
        f"that an event contains; default `{_PAYLOAD.max_size // _KIB}KB`",
        f"more than {message_event.MOST_LEVELS} levels of lists and objects",
        f"and {message_producer.HOLD:g} seconds later",
        f"`[triggerer] shared_stream_subscriber_queue_size` ({message_producer._QUEUE_SIZE})",
        f"{message_producer._PULL_PAUSES[0]:g} s and then at intervals up to {message_producer._PULL_PAUSES[1]:g} s",
    ],
    "assets": [
        f"every `poll_interval` ({_word(dead_letter._INTERVAL / 60)} minute)",
        f"again after {dead_letter._FIRST_PAUSE:g} to {dead_letter._LONGEST_PAUSE:g} seconds",
        f"from {_word(dead_letter.STORED_AFTER / 60)} minute after the event on",
        f"At most {_word(stream_asset._RANGES)} ranges of sequences are named",
    ],
    "monitor": [
        f"one API worker takes every {samples.SAMPLE_SECONDS:g} seconds",
        f"stores for {_word(samples._DAYS / 7)} week in the stream `airflow_monitor`",
        f"and {scanner._MAX_LETTERS:,} per server",
        f"Up to {_word(scanner.MAX_LETTERS / 10**6)} million letters per queue",
    ],
    "worker": [f"`--deadline` | {'one' if worker.DEADLINE == 3_600 else worker.DEADLINE} hour; `none` (`None`)"],
}


def _text(page: str) -> str:
    return " ".join((ROOT / f"docs/{page}.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", STATED)
def test_a_page_states_the_numbers_of_the_code(page: str) -> None:
    text = _text(page)
    assert [stated for stated in STATED[page] if stated not in text] == []


def test_the_page_lists_the_options_of_its_section_with_their_defaults() -> None:
    text = (ROOT / "docs/monitor.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(monitor_\w+)` \| `([^`]*)` \|", text, re.MULTILINE))
    options = get_provider_info()["config"]["jetstream"]["options"]
    assert listed == {name: str(option["default"]) for name, option in options.items()}
