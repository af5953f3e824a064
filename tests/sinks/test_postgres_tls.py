"""PostgreSQL over TLS: what a url says about certificates is passed through to libpq."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from semel.dev.postgres import PostgresServer, postgres
from semel.errors import ConfigError
from tests.sinks.certificates import Certificate, certificate
from tests.sinks.participants import rows
from tests.sinks.postgres_rig import Database, db, write

__all__ = ["certificate", "db"]


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, certificate: Certificate) -> Iterator[PostgresServer]:
    """It takes a key only from its own hands, so it gets a copy into its data folder."""
    with postgres(tmp_path_factory.mktemp("postgres_secure"), say=print) as server:
        owner = server.data.stat()
        for source, name in ((certificate.path, "server.crt"), (certificate.key, "server.key")):
            target = server.data / name
            shutil.copy(source, target)
            target.chmod(0o600)
            os.chown(target, owner.st_uid, owner.st_gid)
        server.stop()
        server.settings["ssl"] = "on"
        server.start()
        yield server


def test_rows_arrive_over_tls_and_the_authority_that_a_url_names_is_asked_for(
    secure: PostgresServer, certificate: Certificate
) -> None:
    database = Database(secure.url)
    at_localhost = secure.url.replace("127.0.0.1", "localhost")
    right, wrong = (f"sslrootcert={path}" for path in (certificate.path, certificate.another))
    database.run("CREATE TABLE seen (ssl bool)")
    database.run("CREATE TABLE orders (id int8, text text)")
    database.run(
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN INSERT INTO "  # noqa: S608 - ours
        f"{database.schema}.seen SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid(); RETURN NULL; END$$"
    )
    database.run("CREATE TRIGGER t AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION note()")
    write(database.sink(url=f"{at_localhost}?sslmode=verify-full&{right}"), rows((1, "a")))
    write(database.sink(url=f"{secure.url}?sslmode=verify-ca&{right}", mode="prepared"), rows((2, "b")), incarnation=2)
    assert database.run("SELECT ssl FROM seen") == [(True,), (True,)]
    refused = {
        f"?sslmode=verify-ca&{wrong}": "certificate verify failed",
        f"?sslmode=verify-full&{right}": "does not match host name",
        "?sslmode=verify-full&sslrootcert=/nowhere/ca.pem": "root certificate file",
    }
    for options, said in refused.items():
        with pytest.raises(ConfigError, match=f"PostgreSQL refused the login: .*{said}"):
            database.sink(url=secure.url + options).check(rows().schema)


def test_a_server_without_tls_is_refused_where_the_url_asks_for_it(db: Database) -> None:
    with pytest.raises(ConfigError, match=r"PostgreSQL refused the login: .*server does not support SSL"):
        db.sink(url=f"{db.url}?sslmode=require").check(rows().schema)
