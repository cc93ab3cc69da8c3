"""Redrives as rows and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.audit.redrives import Redrive, RedriveOutcomes, Wave
    from airflow_provider_jetstream.jetstream.redrive.preview import Preview
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport

_GROUPS = 10
_FAILURES = 10


def redrive_row(redrive: Redrive) -> tuple[object, ...]:
    """Return the columns of a redrive."""
    outcomes = redrive.outcomes
    return (
        redrive.id,
        redrive.state.value,
        f"{redrive.began_at:%Y-%m-%d %H:%M:%S}",
        redrive.redriven,
        outcomes.completed,
        outcomes.died_again,
        outcomes.still_running,
        _who(redrive),
        redrive.why or "",
    )


def redrive_text(redrive: Redrive) -> str:
    """Return a redrive with its waves, and what people asked of it."""
    reason = f": {redrive.reason}" if redrive.reason else ""
    rate = f", {redrive.rate:.1f} letters/s" if redrive.rate else ""
    why = f" ({redrive.why})" if redrive.why else ""
    redriven = _redriven(redrive.redriven, redrive.waves)
    lines = [
        f"redrive {redrive.id} of {redrive.stream}, {redrive.state.value}{reason}",
        f"began {redrive.began_at:%Y-%m-%d %H:%M:%S} UTC by {_who(redrive)}{why}",
        f"{redriven}, {redrive.parked} parked, {redrive.failed} failed, {redrive.gone} gone{rate}",
        outcomes_text(redrive.outcomes),
        *([f"with the patch {redrive.plan['patch']}"] if "patch" in redrive.plan else []),
        *(_wave_text(wave) for wave in redrive.waves),
    ]
    for control in redrive.controls:
        why = f": {control.why}" if control.why else ""
        lines.append(f"{control.at:%Y-%m-%d %H:%M:%S} UTC {control.action} by {control.who}{why}")
    return "\n".join(lines)


def report_text(report: RedriveReport) -> str:
    """Return what a redrive did."""
    redriven = _redriven(len(report.redriven), report.waves)
    counts = f"{redriven}, {len(report.parked)} parked, {report.failures} still dead"
    lines = [
        f"redrive {report.redrive or '?'}, {report.state}{f': {report.reason}' if report.reason else ''}",
        f"{counts}, {len(report.gone)} gone",
        outcomes_text(report.outcomes),
        *(_wave_text(wave) for wave in report.waves),
        *(f"  {sequence}: {why}" for sequence, why in sorted(report.failed.items())[:_FAILURES]),
        *(f"risk: {risk}" for risk in report.risks),
    ]
    return "\n".join(lines)


def outcomes_text(outcomes: RedriveOutcomes) -> str:
    """Return what became of redriven letters."""
    return (
        f"{outcomes.completed} completed after the redrive, {outcomes.died_again} died again,"
        f" {outcomes.still_running} still running, {outcomes.unknown} not known"
    )


def preview_text(preview: Preview) -> str:
    """Return what a redrive would do."""
    lines = [
        f"dry run: {preview.redriven} would be redriven, {preview.parked} parked, {preview.failures} would stay",
        f"protocol {preview.protocol}: {preview.guarantee}",
    ]
    for key, group in preview.groups.largest()[:_GROUPS]:
        lines.append(f"  {group.count}: {', '.join(value for value in key if value)}")
    if preview.changed:
        lines.append(f"{preview.changed} of them would be changed")
    for letter in preview.sample:
        if letter.get("difference"):
            lines += [f"letter {letter['sequence']} would change so:", letter["difference"]]
    several = sorted((item for item in preview.causes.items() if item[1] > 1), key=lambda cause: -cause[1])
    lines += [f"{count} would stay: {why}" for why, count in several[:_FAILURES]]
    lines += [f"  {sequence}: {why}" for sequence, why in list(preview.failed.items())[:_FAILURES]]
    lines += [f"risk: {risk}" for risk in preview.risks]
    return "\n".join(lines)


def _redriven(count: int, waves: Sequence[Wave]) -> str:
    """Return how many letters were redriven, and how many of them are counted twice."""
    again = sum(wave.brought_again for wave in waves)
    return f"{count} redriven" + (f" ({again} of them once more after they had died again)" if again else "")


def _wave_text(wave: Wave) -> str:
    size = "the rest" if wave.size is None else f"{wave.size} letters"
    passed = f", passed by {wave.passed_by}" if wave.passed_by else ""
    reason = f": {wave.reason}" if wave.reason else ""
    lines = [f"wave {wave.number} ({size}), {wave.state}{passed}{reason}", f"  {outcomes_text(wave.outcomes)}"]
    lines += [f"  {death.count} died of {death.error or death.fingerprint}" for death in wave.died_of]
    return "\n".join(lines)


def _who(redrive: Redrive) -> str:
    who = redrive.who
    name = who.get("person") or who.get("user") or who.get("dag_id") or "somebody"
    return str(name)
