"""What a server said before it ended."""

from __future__ import annotations

from semel.dev.logs import telling_line


def test_the_telling_line_is_the_last_that_names_an_error() -> None:
    log = "WARN first\nERROR kafka.Kafka$ - Exiting\nCaused by: SomeException: because\n\tat some.Error.frame(X)\nbye\n"
    assert telling_line(log) == "Caused by: SomeException: because"
    assert telling_line("one\ntwo\n") == "two"
    assert telling_line("") == "it said nothing"


def test_lines_that_name_an_error_without_saying_which_are_passed_over() -> None:
    assert telling_line("[ERROR] Can't open\n[ERROR] Aborting\n") == "[ERROR] Can't open"
    # This one answers our own look whether the server serves yet.
    asked = "FATAL:  the database system is starting up"
    assert telling_line(f"{asked}\nPANIC:  no checkpoint\n{asked}\n") == "PANIC:  no checkpoint"
