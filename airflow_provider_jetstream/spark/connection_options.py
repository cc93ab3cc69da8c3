"""Connection options of the data source, and what the options of a query may choose.

Spark shows options in plans, its pages, its REST API and its event log. Secrets therefore come from the environment,
from files, or from a provider function; the options that take a secret directly have names that Spark redacts.

Options of SQL come from whoever may send a query. A provider is code that runs on the driver, and a file's content is
sent to the server that the options name, so both need the consent of whoever starts Spark. ``SET`` in SQL changes the
session's properties only, hence the policy comes from the properties that the application was started with.
"""

from __future__ import annotations

import importlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

from pydantic import SecretStr

from airflow_provider_jetstream.jetstream.client.settings import VARIABLES as ENVIRONMENT
from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings, split_servers
from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import SparkSession


def _option(field: str) -> str:
    first, *rest = field.split("_")
    return first + "".join(word.capitalize() for word in rest)


# The options that fill the fields of the settings; the second table has the options about JetStream only.
_FIELDS = {_option(field): field for field in ENVIRONMENT}
JETSTREAM_OPTIONS = ("jsDomain", "apiPrefix")
# Each option, and the suffix of its environment variable after NATS_ or NATS_<NAME>_.
VARIABLES = {option: ENVIRONMENT[field] for option, field in _FIELDS.items()}
NAMED_CONNECTION = ("connection", "connectionProvider")

_FIELD = re.compile(rf"\b(?:{'|'.join(field for field in ENVIRONMENT if '_' in field)})\b")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def socket_settings(options: Mapping[str, str]) -> ConnectionSettings:
    """Resolve addresses and credentials; called wherever a connection is made, so that no plan contains a secret.

    :param options: the data source's options, of which others are ignored
    :raises SparkOptionError: the options contradict each other
    :raises ConnectionSettingsError: the settings are incomplete or invalid
    """
    # Spark passes names in lower case.
    lowered = {name.lower(): value for name, value in options.items()}
    values = {name: lowered[name.lower()] for name in VARIABLES if name.lower() in lowered}
    names = {name: values.pop(name) for name in JETSTREAM_OPTIONS if name in values}
    connection, provider = lowered.get("connection"), lowered.get("connectionprovider")
    if connection is not None and values:
        raise SparkOptionError(f"expected either connection or {', '.join(sorted(values))}, found both: keep one")
    if connection is not None:
        values = _named_connection(connection, provider)
    elif provider is not None:
        raise SparkOptionError("expected connection (the argument of connectionProvider), found none")
    elif not values:
        values = _from_environment("NATS_")
    if names:
        values = {name: value for name, value in values.items() if name not in JETSTREAM_OPTIONS} | names
    return _settings(values)


def connection_options(settings: ConnectionSettings) -> dict[str, str]:
    """Return options from which :func:`socket_settings` makes the same settings; they contain secrets."""
    options: dict[str, str] = {}
    for option, field in _FIELDS.items():
        value = getattr(settings, field)
        if value == ConnectionSettings.model_fields[field].default:
            continue
        match value:
            case SecretStr():
                options[option] = value.get_secret_value()
            case _:
                options[option] = str(value)
    return options | {"servers": ",".join(settings.servers), "timeout": f"{settings.timeout:g}"}


def _named_connection(name: str, provider: str | None) -> dict[str, str]:
    if not _NAME.fullmatch(name):
        # Not repeated: it may be an address with credentials.
        raise SparkOptionError("expected a connection's name of letters, digits, - and _, found other characters")
    if provider is None:
        prefix = f"NATS_{name.upper().replace('-', '_')}_"
        if variables := _from_environment(prefix):
            return variables
        raise ConnectionSettingsError(
            f"expected variables such as {prefix}URL in the environment of drivers and executors, found none: set them"
            " there, or with spark.executorEnv.*"
        )
    module, _, function = provider.partition(":")
    try:
        provide = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError):
        raise SparkOptionError(
            f"expected connectionProvider as package.module:function, importable wherever tasks run, found {provider!r}"
        ) from None
    values = dict(provide(name))
    if unknown := sorted(set(values) - set(VARIABLES)):
        raise ConnectionSettingsError(
            f"expected {provider} to return only {', '.join(VARIABLES)}, found {', '.join(map(repr, unknown))}"
        )
    return values


def _from_environment(prefix: str) -> dict[str, str]:
    return {name: os.environ[prefix + suffix] for name, suffix in VARIABLES.items() if os.environ.get(prefix + suffix)}


def _settings(values: Mapping[str, str]) -> ConnectionSettings:
    servers = split_servers(values.get("servers", ""))
    if not servers:
        raise ConnectionSettingsError(
            "expected servers, or connection, or NATS_URL in the environment of drivers and executors, found none"
        )
    fields: dict[str, Any] = {_FIELDS[option]: value for option, value in values.items() if option != "servers"}
    try:
        return ConnectionSettings(servers=servers, name="airflow-provider-jetstream-spark", **fields)
    except ConnectionSettingsError as error:
        problem = str(error)
    raise ConnectionSettingsError(_FIELD.sub(lambda match: _option(match[0]), problem))


ALLOWED_PROVIDERS: Final = "spark.jetstream.allowedProviders"
ALLOWED_FILES: Final = "spark.jetstream.allowedFiles"
ALLOWED_SERVERS: Final = "spark.jetstream.allowedServers"
POLICY_PROPERTIES: Final = (ALLOWED_PROVIDERS, ALLOWED_FILES, ALLOWED_SERVERS)

# The text that SQL's SET shows for a property that isn't set; for a withheld one it shows another.
_UNSET = "<undefined>"
# Certificates of authorities aren't sent to anybody.
_UNSENT_FILES = frozenset({"tlscafile"})


@dataclass(frozen=True)
class ConnectionPolicy:
    """What options may choose; by default any server with the secrets that the options themselves contain.

    :param providers: the functions that ``connectionProvider`` may name
    :param files: the folders and files from which options may read
    :param servers: the only servers that options may name; ``None`` for any, then no file with a secret may be named
    """

    providers: frozenset[str] = frozenset()
    files: tuple[Path, ...] = ()
    servers: frozenset[str] | None = None

    @classmethod
    def of_session(cls, session: SparkSession) -> Self:
        """Read the properties that the application, or the server of Spark Connect, was started with.

        :raises SparkOptionError: a property can't be used
        """
        context = getattr(session, "sparkContext", None)
        if context is None:
            values = _properties_of_server(session)
        else:
            values = [context.getConf().get(name, "") for name in POLICY_PROPERTIES]
        providers, files, servers = map(_listed, values)
        if relative := [file for file in files if not Path(file).is_absolute()]:
            raise SparkOptionError(f"expected absolute paths in {ALLOWED_FILES}, found {', '.join(relative)}")
        return cls(
            frozenset(providers),
            tuple(Path(file).resolve() for file in files),
            frozenset(ConnectionSettings(servers=(server,)).servers[0] for server in servers) if servers else None,
        )

    def check(self, options: Mapping[str, str]) -> None:
        """Refuse options that choose what isn't allowed.

        :param options: names in any case
        :raises SparkOptionError: naming the option, and the property that would allow it
        """
        lowered = {name.lower(): value for name, value in options.items()}
        provider = lowered.get("connectionprovider")
        if provider is not None and provider not in self.providers:
            raise SparkOptionError(
                f"expected connectionProvider to be one of {ALLOWED_PROVIDERS} ({_shown(self.providers)}), found"
                f" {provider!r}: add it there when Spark is started"
            )
        files = sorted((name, value) for name, value in options.items() if name.lower().endswith("file"))
        for name, value in files:
            self._check_file(name, value)
        if self.servers is not None and (servers := _listed(lowered.get("servers", ""))):
            allowed = self.servers
            if other := [server for server in ConnectionSettings(servers=servers).servers if server not in allowed]:
                raise SparkOptionError(
                    f"expected servers among {ALLOWED_SERVERS} ({_shown(allowed)}), found {', '.join(other)}: add it"
                    " there when Spark is started"
                )

    def _check_file(self, option: str, path: str) -> None:
        resolved = Path(path).resolve() if "\0" not in path else None
        if resolved is None or not any(resolved.is_relative_to(allowed) for allowed in self.files):
            raise SparkOptionError(
                f"{option}: expected a file below one of {ALLOWED_FILES} ({_shown(map(str, self.files))}), found"
                f" {path!r}: add its folder there when Spark is started, or name a connection whose variables in the"
                " environment name the file"
            )
        if option.lower() not in _UNSENT_FILES and self.servers is None:
            raise SparkOptionError(
                f"{option}: expected {ALLOWED_SERVERS} to say to which servers options may send the content of files,"
                " found none: set it when Spark is started"
            )


def _properties_of_server(session: Any) -> list[str | None]:
    """Ask the server of Spark Connect in a session of its own, in which nobody can have set anything.

    :raises SparkOptionError: the server withholds which servers are allowed, which mustn't count as all
    """
    # SparkSession.newSession came to Spark Connect in 4.3 only.
    from pyspark.sql.connect.session import SparkSession as RemoteSession

    given = session.client
    own = RemoteSession(connection=given._builder, userId=given._user_id)  # noqa: SLF001
    channel = own.client
    try:
        # The address may name the session.
        own._session_id = channel._session_id = str(uuid4())  # noqa: SLF001
        values = [own.conf.get(name, "") for name in POLICY_PROPERTIES]
        if not values[-1] and own.sql(f"SET {ALLOWED_SERVERS}").collect()[0].value != _UNSET:
            raise SparkOptionError(
                f"expected a value of {ALLOWED_SERVERS} that Spark Connect shows, found one that it withholds"
                " (spark.redaction.regex): name servers without secret, password, token and access key"
            )
        return values
    finally:
        # The server releases in time whatever isn't released here.
        with suppress(Exception):
            channel.release_session()
        # In PySpark 4.1, close() also ends what other sessions of this process are about to send.
        channel._channel.close()  # noqa: SLF001


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _shown(values: Iterable[str]) -> str:
    return ", ".join(sorted(values)) or "none"
