"""What the brokers of a local Kafka are told: one properties file each. Nothing here does I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from semel.errors import ConfigError

CLIENT, INTERNAL, CONTROLLER = "CLIENT", "INTERNAL", "CONTROLLER"


PLAIN, OAUTHBEARER, GSSAPI = "PLAIN", "OAUTHBEARER", "GSSAPI"


@dataclass(frozen=True)
class Tls:
    """The key and certificate of the brokers, a PKCS12 store, and in PEM the certificates that clients trust."""

    store: Path
    password: str = field(repr=False)
    trusted: Path


@dataclass(frozen=True)
class Kerberos:
    """By which name a KDC knows the brokers: `principal` is such as kafka/localhost@REALM. `config` is a krb5.conf."""

    principal: str
    keytab: Path
    config: Path

    @property
    def service(self) -> str:
        return self.principal.partition("/")[0]


@dataclass(frozen=True)
class Security:
    """Clients say who they are (SASL), and may do what an ACL allows them; super users may do everything.

    `users` log in by PLAIN. Passwords for other `mechanisms`, such as SCRAM-SHA-512, are given to a broker that runs.
    By OAUTHBEARER anybody is who an unsigned token says: a broker takes those for tests only.
    """

    users: Mapping[str, str] = field(repr=False)
    super_users: tuple[str, ...] = ("admin",)
    tls: Tls | None = None
    mechanisms: tuple[str, ...] = (PLAIN,)
    kerberos: Kerberos | None = None
    #: How long a login lasts; 0 is for as long as the connection.
    login_ms_max: int = 0

    def __post_init__(self) -> None:
        if (GSSAPI in self.mechanisms) != (self.kerberos is not None):
            raise ConfigError("A Kafka with the mechanism GSSAPI needs `kerberos`, and no other does.")
        for name in self.users:
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
                raise ConfigError(
                    f"A Kafka user cannot be named {name!r}.", remedy="Use letters, digits, '.', '_', '-'."
                )
        without = [name for name in self.super_users if name not in self.users]
        if without or not self.super_users:
            raise ConfigError(
                f"These super users have no password: {', '.join(without) or 'there is no super user at all'}.",
                remedy="Name every super user, at least one, in `users` too: nobody else can make the first ACL.",
            )


@dataclass(frozen=True)
class Ports:
    """Where one broker listens. The last two are plain text even when clients must log in."""

    client: int
    internal: int
    controller: int


@dataclass(frozen=True)
class Layout:
    """A cluster on paper."""

    folder: Path
    ports: tuple[Ports, ...]
    properties: Mapping[str, str] = field(default_factory=dict)
    security: Security | None = None
    # The quick compiler and one collector start a broker with two thirds of the work. Over some million rows its
    # throughput was no lower, but a benchmark should have the compiler that production has.
    quick: bool = False
    heap_mb: int = 512

    @property
    def protocol(self) -> str:
        """How clients talk to the brokers."""
        if self.security is None:
            return "PLAINTEXT"
        return "SASL_SSL" if self.security.tls else "SASL_PLAINTEXT"

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{ports.client}" for ports in self.ports)

    def broker_folder(self, broker: int) -> Path:
        return self.folder / f"broker-{broker}"

    def data_folder(self, broker: int) -> Path:
        return self.broker_folder(broker) / "data"

    def settings(self, broker: int) -> Path:
        return self.broker_folder(broker) / "server.properties"

    def log(self, broker: int) -> Path:
        return self.broker_folder(broker) / "broker.log"


def properties_of(layout: Layout, broker: int) -> dict[str, str]:
    """Everything one broker is told. What the caller asked for beats what we think best."""
    chosen = {
        **_identity(layout, broker),
        **_replication(min(3, len(layout.ports))),
        **_QUICK_ON_ONE_MACHINE,
        **(_security(layout.security) if layout.security else {}),
    }
    return {**chosen, **layout.properties}


def as_text(properties: Mapping[str, str]) -> str:
    """A Java properties file."""
    return "".join(f"{_escaped(key)}={_escaped(value)}\n" for key, value in properties.items())


_QUICK_ON_ONE_MACHINE = {
    # Few partitions: a coordinator loads each of them when it starts or takes over.
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    "num.partitions": "1",
    # A consumer group waits three seconds for more members before it hands out partitions, unless told not to.
    "group.initial.rebalance.delay.ms": "0",
    # A misspelt topic should fail in a test, not come to life.
    "auto.create.topics.enable": "false",
    # How often the broker looks for transactions that ran out of time; ten seconds by default.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # A broker that was killed is let in again when its old session has ended; nine seconds by default.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "log.cleaner.enable": "true",
}


def _identity(layout: Layout, broker: int) -> dict[str, str]:
    own = layout.ports[broker]
    listeners = {CLIENT: own.client, INTERNAL: own.internal, CONTROLLER: own.controller}
    protocols = {CLIENT: layout.protocol, INTERNAL: "PLAINTEXT", CONTROLLER: "PLAINTEXT"}
    voters = (f"{number}@127.0.0.1:{ports.controller}" for number, ports in enumerate(layout.ports))
    return {
        "process.roles": "broker,controller",
        "node.id": str(broker),
        "controller.quorum.voters": ",".join(voters),
        "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in listeners.items()),
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
        "inter.broker.listener.name": INTERNAL,
        "controller.listener.names": CONTROLLER,
        "log.dirs": str(layout.data_folder(broker)),
    }


def _replication(copies: int) -> dict[str, str]:
    enough = str(max(1, copies - 1))
    return {
        "default.replication.factor": str(copies),
        "min.insync.replicas": enough,
        "offsets.topic.replication.factor": str(copies),
        "transaction.state.log.replication.factor": str(copies),
        "transaction.state.log.min.isr": enough,
        "share.coordinator.state.topic.replication.factor": str(copies),
        "share.coordinator.state.topic.min.isr": enough,
    }


def _security(security: Security) -> dict[str, str]:
    client = f"listener.name.{CLIENT.lower()}"
    users = " ".join(f'user_{name}="{_quoted(password)}"' for name, password in security.users.items())
    modules = "org.apache.kafka.common.security"
    supers = ["ANONYMOUS", *security.super_users]
    words = {
        OAUTHBEARER: f'{modules}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";',
        GSSAPI: _krb5(security.kerberos) if security.kerberos else "",
    }
    logins = {
        f"{client}.{name.lower()}.sasl.jaas.config": words.get(name, f"{modules}.scram.ScramLoginModule required;")
        for name in security.mechanisms
        if name != PLAIN
    }
    # Beside Kerberos, Kafka logs itself in by Kerberos for the other mechanisms, too, and asks for this.
    service = {"sasl.kerberos.service.name": security.kerberos.service} if security.kerberos else {}
    lasting = {f"{client}.connections.max.reauth.ms": str(security.login_ms_max)} if security.login_ms_max else {}
    return {
        f"{client}.sasl.enabled.mechanisms": ",".join(security.mechanisms),
        f"{client}.plain.sasl.jaas.config": f"{modules}.plain.PlainLoginModule required {users};",
        **logins,
        **service,
        **lasting,
        **(_tls(client, security.tls) if security.tls else {}),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        # A client of a plain text listener is anonymous: that is how brokers reach each other.
        "super.users": ";".join(f"User:{name}" for name in supers),
        "allow.everyone.if.no.acl.found": "false",
    }


def _krb5(own: Kerberos) -> str:
    module = "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true storeKey=true"
    words = {"keyTab": str(own.keytab), "principal": own.principal}
    quoted = (f'{name}="{_quoted(value)}"' for name, value in words.items())
    return f"{module} {' '.join(quoted)};"


def _tls(client: str, tls: Tls) -> dict[str, str]:
    return {
        f"{client}.ssl.keystore.type": "PKCS12",
        f"{client}.ssl.keystore.location": str(tls.store),
        f"{client}.ssl.keystore.password": tls.password,
    }


def _quoted(text: str) -> str:
    """As it stands between the quotes of a JAAS entry."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _escaped(text: str) -> str:
    plain = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    # Java reads the file as Latin-1 and counts in UTF-16 units.
    return re.sub(r"[^\x00-\x7f]", lambda found: _java_units(found.group()), plain)


def _java_units(character: str) -> str:
    return "".join(
        f"\\u{high:02x}{low:02x}" for high, low in zip(*[iter(character.encode("utf-16-be"))] * 2, strict=True)
    )
