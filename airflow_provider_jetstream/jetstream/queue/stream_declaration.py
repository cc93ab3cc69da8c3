"""What all declarations share: units, checks of values, and the fields of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import WithJsonSchema

from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.line_text import shown_field, shown_value
from airflow_provider_jetstream.jetstream.units import DURATION_FORM, SIZE_FORM, parse_duration, parse_size

# Before the models, which pydantic builds in full only where these names are already known.
Duration = Annotated[int, BeforeValidator(parse_duration), WithJsonSchema(DURATION_FORM)]
Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema(SIZE_FORM)]


def _require_utf8(text: str) -> str:
    if text != text.encode(errors="replace").decode():
        raise ValueError(f"expected text that UTF-8 can encode, found {shown_value(text)}")
    return text


Text = Annotated[str, AfterValidator(_require_utf8)]


class Declaration(BaseModel):
    """A frozen model without unknown fields, which reports every problem of its values at once.

    :raises QueueDeclarationError: the server would refuse it, or jobs would be lost
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str] = "work queue"

    # Each model repeats the signature for type checkers: they would derive one from the fields and refuse the other
    # forms that fields accept, such as a list, ``"30s"`` or a stream's name.
    def __init__(self, *unnamed: object, **values: Any) -> None:
        if unnamed:
            raise QueueDeclarationError("?", [f"expected its fields by name, found {unnamed[0]!r}"], self.kind)
        try:
            super().__init__(**values)
        except ValidationError as error:
            name = values.get("name", "?")
            shown = name if isinstance(name, str) else shown_value(name)
            raise QueueDeclarationError(shown, _problem_texts(error), self.kind) from None

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return the declared fields; one that isn't declared keeps its value on the server, so none is added.

        :param options: as pydantic takes them
        """
        return super().model_dump(**{"exclude_unset": True} | options)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := self._problems():
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> list[str]:
        return []


class Stream(Declaration):
    """The fields that every stream of a queue may declare, as in JetStream's stream configuration.

    :param name: the stream's name
    :param subjects: the subjects that it captures
    :param description: text for people
    :param storage: ``file`` or ``memory``
    :param num_replicas: the number of servers that store it, 1 to 5
    :param discard: what happens when it is full: ``old`` drops the oldest messages, ``new`` refuses new ones
    :param max_msgs: messages at most; ``-1`` for no limit
    :param max_msgs_per_subject: messages of each subject at most; ``-1`` for no limit
    :param max_bytes: bytes at most, headers included; ``-1`` for no limit
    :param max_msg_size: bytes of a message at most, headers included; ``-1`` for no limit
    :param max_age: how long a message is stored; ``-1`` for no limit
    :param duplicate_window: how long the server remembers the ids of messages, of which it stores none twice
    :param deny_delete: whether the server refuses to delete single messages
    :param deny_purge: whether the server refuses to purge the stream
    :param allow_direct: whether many messages can be read at once, and from every server that stores them
    :param allow_rollup_hdrs: ``False`` as by default: with it, one message with ``Nats-Rollup`` removes all others
    :param metadata: names and values for programs
    """

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    name: Text
    subjects: tuple[str, ...] = ()
    description: Text | None = None
    storage: Literal["file", "memory"] = "file"
    num_replicas: int = Field(default=1, ge=1, le=5)
    discard: Literal["old", "new"] | None = None
    max_msgs: int | None = Field(default=None, ge=-1)
    max_msgs_per_subject: int | None = Field(default=None, ge=-1)
    max_bytes: Size | None = None
    max_msg_size: Size | None = None
    max_age: Duration | None = None
    duplicate_window: Duration | None = None
    deny_delete: bool | None = None
    deny_purge: bool | None = None
    allow_direct: bool | None = None
    allow_rollup_hdrs: bool | None = None
    metadata: dict[Text, Text] | None = None

    @property
    def fed_by_others(self) -> bool:
        """Whether it may do without subjects, since other streams feed it."""
        return False

    def config(self) -> dict[str, Any]:
        """Return what is declared of the stream's configuration, as JetStream's JSON."""
        declared = {field: getattr(self, field) for field in Stream.model_fields}
        config = {"allow_rollup_hdrs": False} | {field: value for field, value in declared.items() if value is not None}
        # Users write -1 for no limit; the server answers with 0.
        if config.get("max_age") == -1:
            config["max_age"] = 0
        return config | {"subjects": list(self.subjects), "retention": self._retention()}

    def _retention(self) -> str:
        return "limits"


# Fields of earlier declarations.
_REMOVED = {
    "atomic_redrive": (
        "no such field any more: leave it out, and declare an archive (the default beside dead_letters), with which a"
        " redrive by copy repeats no letter either"
    ),
}


def _problem_texts(error: ValidationError) -> list[str]:
    problems: list[str] = []
    for problem in error.errors(include_url=False):
        cause = problem.get("ctx", {}).get("error")
        field = shown_field(problem["loc"])
        if isinstance(cause, QueueDeclarationError):
            texts = list(cause.problems)
        elif problem["type"] == "extra_forbidden":
            texts = [_REMOVED.get(field) or "no such field: check its spelling, it is JetStream's own name"]
        else:
            texts = problem["msg"].removeprefix("Value error, ").split("\n")
        problems += [f"{field}: {text}" if field else text for text in texts]
    return problems
