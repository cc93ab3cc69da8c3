"""What the options of a query may choose: the providers, files and servers that the application's properties allow.

Options of SQL come from whoever may send a query. A provider is code that runs on the driver, and a file's content is
sent to the server that the options name, so both need the consent of whoever starts Spark. ``SET`` in SQL changes the
session's properties only, hence the policy comes from the properties that the application was started with.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import SparkSession

ALLOWED_PROVIDERS: Final = "spark.jetstream.allowedProviders"
ALLOWED_FILES: Final = "spark.jetstream.allowedFiles"
ALLOWED_SERVERS: Final = "spark.jetstream.allowedServers"
POLICY_PROPERTIES: Final = (ALLOWED_PROVIDERS, ALLOWED_FILES, ALLOWED_SERVERS)

# What SQL's SET shows of a property that isn't set; of one that is withheld it shows something else.
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

    own = RemoteSession(connection=session.client._builder, userId=session.client._user_id)  # noqa: SLF001
    client = own.client
    try:
        # The address may name the session.
        own._session_id = client._session_id = str(uuid4())  # noqa: SLF001
        values = [own.conf.get(name, "") for name in POLICY_PROPERTIES]
        if not values[-1] and own.sql(f"SET {ALLOWED_SERVERS}").collect()[0].value != _UNSET:
            raise SparkOptionError(
                f"expected a value of {ALLOWED_SERVERS} that Spark Connect shows, found one that it withholds"
                " (spark.redaction.regex): name servers without secret, password, token and access key"
            )
        return values
    finally:
        # What isn't released here, the server releases in time.
        with suppress(Exception):
            client.release_session()
        # In PySpark 4.1, close() also ends what other sessions of this process are about to send.
        client._channel.close()  # noqa: SLF001


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _shown(values: Iterable[str]) -> str:
    return ", ".join(sorted(values)) or "none"
