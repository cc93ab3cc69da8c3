"""What all of the monitor's models have in common."""

from pydantic import BaseModel, ConfigDict


class MonitorModel(BaseModel):
    """Unchanging, and without fields that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Problem(MonitorModel):
    """Why something can't be told.

    :param code: the error's code, which stays the same
    :param message: what was expected, what was found, and what to do
    """

    code: str
    message: str
