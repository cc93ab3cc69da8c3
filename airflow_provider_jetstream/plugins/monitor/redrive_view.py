"""The page's models of a redrive, made from its object in the audit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.plugins.monitor.letter_view import person_of
from airflow_provider_jetstream.plugins.monitor.models.redrives import (
    ControlView,
    DeathCountView,
    OutcomesView,
    RedriveList,
    RedriveView,
    WaveView,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from airflow_provider_jetstream.jetstream.audit.redrives import Redrive, RedriveOutcomes, Wave
    from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding


def dags_of(redrive: Redrive) -> tuple[str | None, ...]:
    """Return the DAGs that a redrive names: the one that ran it, and the one whose letters it selects.

    ``None`` stands for one that isn't known: a program or a person ran it, or the record names what can't be a DAG.
    """
    named = (redrive.who.get("dag_id"), redrive.selection.get("dag_id"))
    known = tuple(dag_id for dag_id in named if isinstance(dag_id, str))
    odd = any(dag_id is not None and not isinstance(dag_id, str) for dag_id in named)
    return (*known, None) if odd or not known else known


def redrive_list(
    redrives: Iterable[Redrive],
    sees_all: Callable[[Iterable[str | None]], bool],
    hiding: Hiding,
    *,
    dag_id: str | None = None,
    run_id: str | None = None,
) -> RedriveList:
    """Return those of a queue's redrives that a user may see.

    :param sees_all: whether the user may see what names some DAGs; it may block
    :param dag_id: only those that tasks of this DAG ran
    :param run_id: only those of this DAG run
    """
    wanted = [
        redrive
        for redrive in redrives
        if dag_id in (None, redrive.who.get("dag_id")) and run_id in (None, redrive.who.get("run_id"))
    ]
    shown = [redrive for redrive in wanted if sees_all(dags_of(redrive))]
    return RedriveList(
        redrives=[redrive_view(redrive, hiding) for redrive in shown], not_shown=len(wanted) - len(shown)
    )


def redrive_view(redrive: Redrive, hiding: Hiding) -> RedriveView:
    """Return a redrive for the page.

    Its letters may be of DAGs that the user may not see unless the selection names one, and its texts about them.
    """
    of_unknown = hiding.of_unknown and redrive.selection.get("dag_id") is None
    hidden = hiding.all or of_unknown
    failures = redrive.report.get("failures")
    return RedriveView(
        id=redrive.id,
        queue=redrive.stream,
        state=redrive.state.value,
        reason="" if of_unknown else readable_text(redrive.reason),
        user=person_of(redrive.who),
        who=redrive.who,
        why=None if of_unknown else redrive.why,
        selection={} if of_unknown else redrive.selection,
        hidden=of_unknown,
        # The values of a patch may be those of bodies.
        plan={name: value for name, value in redrive.plan.items() if name != "patch" or not hidden},
        letters=redrive.letters,
        began_at=redrive.began_at,
        at=redrive.at,
        redriven=redrive.redriven,
        parked=redrive.parked,
        failed=redrive.failed,
        gone=redrive.gone,
        rate=redrive.rate,
        outcomes=_outcomes(redrive.outcomes),
        failures={str(sequence): str(why) for sequence, why in failures.items()}
        if isinstance(failures, dict) and not hidden
        else {},
        waves=[_wave(wave, hidden=hidden, of_unknown=of_unknown) for wave in redrive.waves],
        controls=[
            ControlView(
                action=control.action,
                who=control.who,
                why=None if of_unknown else control.why,
                at=control.at,
                obeyed=control.sequence <= redrive.controls_to,
            )
            for control in redrive.controls
        ],
        summary=summary_of(redrive),
    )


def summary_of(redrive: Redrive) -> str:
    """Return what a redrive did and what became of it, a sentence; what isn't known is said to be unknown."""
    outcomes = redrive.outcomes
    brought_again = sum(wave.brought_again for wave in redrive.waves)
    parked_again = sum(wave.parked_again for wave in redrive.waves)
    done = [
        _counted(redrive.redriven, "letter") + " redriven",
        *([f"{brought_again} of them once more after they had died again"] if brought_again else []),
        *([f"{redrive.parked} parked"] if redrive.parked else []),
        *([f"{redrive.failed} failed"] if redrive.failed else []),
        *([f"{redrive.gone} were no dead letters any more"] if redrive.gone else []),
    ]
    known = [
        *([f"{outcomes.completed} completed after redrive"] if outcomes.completed else []),
        *([f"{outcomes.died_again} died again"] if outcomes.died_again else []),
        *([f"{parked_again} died again and were parked"] if parked_again else []),
        *([f"{outcomes.still_running} still running"] if outcomes.still_running else []),
    ]
    seen = outcomes.completed + outcomes.died_again + outcomes.still_running + brought_again + parked_again
    rest = redrive.redriven - seen
    if rest > 0:
        known.append(f"{rest} of unknown outcome")
    return f"{', '.join(done)}{': ' if known else ''}{', '.join(known)}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _outcomes(outcomes: RedriveOutcomes) -> OutcomesView:
    return OutcomesView(
        completed=outcomes.completed,
        died_again=outcomes.died_again,
        still_running=outcomes.still_running,
        unknown=outcomes.unknown,
    )


def _wave(wave: Wave, *, hidden: bool, of_unknown: bool) -> WaveView:
    return WaveView(
        number=wave.number,
        size=wave.size,
        state=wave.state,
        began_at=wave.began_at,
        redriven=wave.redriven,
        parked=wave.parked,
        outcomes=_outcomes(wave.outcomes),
        died_of=[
            DeathCountView(
                fingerprint=count.fingerprint,
                error="" if hidden else readable_text(count.error),
                count=count.count,
                as_before=count.as_before,
            )
            for count in wave.died_of
        ],
        parked_again=wave.parked_again,
        brought_again=wave.brought_again,
        passed_by=wave.passed_by,
        reason="" if of_unknown else wave.reason,
    )
