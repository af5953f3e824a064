"""kill -9 between the decision and the commits, with brokers that let nobody in without a token or a ticket.

The source is Spark's own client, which is Java. The sink logs in from Python, in the driver and in each worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from semel.dev.kafka import Kerberos, Security, kafka
from semel.dev.kerberos import REALM, host, kdc
from tests.e2e.kafka_game import KafkaGame, forwarded
from tests.kerberos_library import gssapi_folder

Play = Callable[..., KafkaGame]
TOKENS = {"kafka.security.protocol": "SASL_PLAINTEXT", "kafka.sasl.mechanism": "OAUTHBEARER"}
KERBEROS = {
    "kafka.security.protocol": "SASL_PLAINTEXT",
    "kafka.sasl.mechanism": "GSSAPI",
    "kafka.sasl.kerberos.service.name": "kafka",
}
#: Passwords that nobody uses: whoever is a super user must have one.
USERS = {"admin": "admin", "app": "app"}


def cluster(folder: Path, **security: Any) -> AbstractContextManager[Any]:
    """Sessions are short, so that each client logs in again while it works."""
    made = Security(USERS, super_users=("admin", "app"), **security)
    return kafka(folder, security=made, quick=True, say=print)


def killed_and_run_to_its_end(play: Play, cluster: Any, **setup: Any) -> None:
    """The game looks at the brokers by the listener that asks for nothing; the pipeline cannot."""
    plain = f"127.0.0.1:{cluster.layout.ports[0].internal}"
    game = play(batches=4, servers=cluster.bootstrap, watched_at=plain, **setup)
    life = game.live("batch.decided@2")
    assert life.killed, life.error
    left = game.open_transactions()
    assert left != []
    last = game.require_good_end(game.live())
    assert [staged for _, staged in forwarded(last)] == [False]


@pytest.mark.parametrize("producer", ["auto", pytest.param("librdkafka", marks=pytest.mark.long)])
def test_with_tokens_of_a_function(tmp_path: Path, make_kafka_game: Play, producer: str) -> None:
    module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
    jaas = f'{module} required unsecuredLoginStringClaim_sub="app";'
    with cluster(tmp_path / "kafka", mechanisms=("PLAIN", "OAUTHBEARER"), login_ms_max=2500) as brokers:
        killed_and_run_to_its_end(
            make_kafka_game,
            brokers,
            source={**TOKENS, "kafka.sasl.jaas.config": jaas},
            kafka={"options": {"security.protocol": "SASL_PLAINTEXT"}, "producer": producer},
            tokens_for="app",
        )


@pytest.mark.long
def test_with_kerberos(tmp_path: Path, make_kafka_game: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = gssapi_folder()
    if folder is not None:
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with kdc(tmp_path / "kdc", say=print) as realm:
        monkeypatch.setenv("KRB5_CONFIG", str(realm.config))
        brokers = Kerberos(f"kafka/{host()}@{REALM}", realm.keytab(f"kafka/{host()}"), realm.config)
        keytab = realm.keytab("app")
        words = f'useKeyTab=true storeKey=true keyTab="{keytab}" principal="app@{REALM}"'
        options = {
            **KERBEROS,
            "kafka.sasl.jaas.config": f"com.sun.security.auth.module.Krb5LoginModule required {words};",
        }
        with cluster(tmp_path / "kafka", mechanisms=("PLAIN", "GSSAPI"), kerberos=brokers) as running:
            killed_and_run_to_its_end(
                make_kafka_game,
                running,
                # The same words for Spark and for semel.
                source=options,
                kafka={"options": options},
                conf=(("spark.driver.extraJavaOptions", f"-Djava.security.krb5.conf={realm.config}"),),
            )
