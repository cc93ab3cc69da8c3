"""The model of a diagnosis of dead letters."""

from typing import Any, Self

from airflow_provider_jetstream.jetstream.dead_letters.diagnose import Diagnosis
from airflow_provider_jetstream.plugins.monitor.models.base import MonitorModel

_QUOTING = ("error_message", "advice", "evidence", "headline")


class DiagnosisView(MonitorModel):
    """A diagnosis of dead letters, as ``diagnose_dead_letters`` makes it.

    :param headline: the diagnosis in one line; ``null`` where texts are hidden
    :param groups: the letters by cause, largest first; without texts that may quote bodies where these are hidden
    :param letters_left_out: letters of causes that aren't among the groups
    """

    queue: str
    at: str
    dead: int
    uncertain: int
    action: str
    headline: str | None
    groups: list[dict[str, Any]]
    letters_left_out: int

    @classmethod
    def of(cls, diagnosis: Diagnosis, *, hidden: bool) -> Self:
        """Return a diagnosis for the page.

        :param hidden: whether texts that may quote bodies are left out
        """
        values = diagnosis.as_json()
        if hidden:
            values["headline"] = None
            values["groups"] = [
                {name: None if name in _QUOTING else value for name, value in group.items()}
                for group in values["groups"]
            ]
        return cls(**{name: values[name] for name in cls.model_fields})
