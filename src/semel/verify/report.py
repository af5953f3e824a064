"""What came of a run, in three files: a page for people, JUnit XML for a build server, and the JSON object."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from semel.verify.anomalies import NAMES, Anomaly
from semel.verify.audit import Audit
from semel.verify.history import History, Sights
from semel.verify.report_html import page

PAGE, JUNIT, OBJECT = "report.html", "junit.xml", "result.json"

#: What each test case of the JUnit file claims of a sink.
CLAIMS = {
    "lost": "no row is lost",
    "duplicated": "no row is duplicated",
    "torn": "no batch is torn",
    "split": "no batch is split from other sinks",
    "early": "no batch is early",
    "reordered": "no key is reordered",
    "orphan": "nothing is left behind",
}
#: What XML 1.0 has no way to say.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_json(history: History, audit: Audit, seconds: float) -> dict[str, Any]:
    """The object that `semel verify --json` prints."""
    return {
        "verdict": audit.verdict,
        "seed": history.seed,
        "rows": history.rows,
        "batches": audit.batches,
        "kills": history.kills,
        "faults": dict(sorted(history.faults.items())),
        **audit.counts,
        "seconds": seconds,
        "pipeline": history.pipeline,
        "guarantee": history.guarantee,
        "compared": audit.compared,
        "reasons": list(audit.reasons),
        "evidence": [_evidence(history, anomaly) for anomaly in audit.anomalies],
        "proven": list(audit.proven),
        "not_proven": list(audit.not_proven),
        "replay": history.replay,
    }


def _evidence(history: History, anomaly: Anomaly) -> dict[str, Any]:
    """`at_s` is in seconds since the run began; None where the last look shows it."""
    at_s = round(anomaly.at_s - history.began_s, 3) if anomaly.at_s else None
    return {"kind": anomaly.kind, "sink": anomaly.sink, "evidence": anomaly.evidence, "at_s": at_s}


def write_report(folder: Path, history: History, audit: Audit) -> Path:
    """Write the three files, each whole or not at all, and return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    seconds = round(history.ended_s - history.began_s, 1)
    body = json.dumps(as_json(history, audit, seconds), indent=2, ensure_ascii=False) + "\n"
    _write(folder / OBJECT, body)
    _write(folder / JUNIT, junit(history, audit, seconds))
    _write(folder / PAGE, page(history, audit, folder))
    return folder / PAGE


def _write(path: Path, text: str) -> None:
    """Nobody who looks on finds half a file."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
    os.replace(temporary, path)


# JUnit ----------------------------------------------------------------------------------------------------------------


def junit(history: History, audit: Audit, seconds: float) -> str:
    """One case for the run itself, and one per sink and property: passed, failed with evidence, in error or skipped."""
    suite = Element("testsuite", name=f"semel verify {_xml(history.pipeline)}", time=str(seconds))
    run = SubElement(suite, "testcase", classname=_xml(history.pipeline), name="the run compared what it was asked to")
    if audit.reasons:
        SubElement(run, "error", message=_xml(audit.reasons[0])).text = _xml("\n".join(audit.reasons))
    for sights in history.sights:
        for kind in NAMES:
            _case(suite, history, audit, sights, kind)
    cases = list(suite)
    for name, what in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(what) is not None for case in cases)))
    suite.set("tests", str(len(cases)))
    SubElement(suite, "system-out").text = _xml(f"seed {history.seed}\n{history.replay}")
    indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(suite, encoding="unicode") + "\n"


def _case(suite: Element, history: History, audit: Audit, sights: Sights, kind: str) -> None:
    name = _xml(f"{history.pipeline}.{sights.sink}")
    case = SubElement(suite, "testcase", classname=name, name=CLAIMS[kind])
    found = audit.by_sink[sights.sink][kind]
    why = audit.unchecked[sights.sink].get(kind, "")
    if found:
        evidence = [a.evidence for a in audit.anomalies if (a.kind, a.sink) == (kind, sights.sink)]
        failure = SubElement(case, "failure", message=_xml(f"{found} {kind}: {evidence[0]}"), type=kind)
        failure.text = _xml("\n".join([*evidence, *(["..."] if found > len(evidence) else [])]))
    elif sights.error:
        SubElement(case, "error", message=_xml(why))
    elif why:
        SubElement(case, "skipped", message=_xml(why))


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)
