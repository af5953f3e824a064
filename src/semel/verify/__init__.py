"""A pipeline broken on purpose, again and again, while readers watch its sinks: `semel verify`.

The pipeline runs as its user wrote it, in a process group of its own. Its source is fed with rows that are known by
number; a plan made of one seed says which faults are injected and when; a reader per sink looks all the time. When the
plan is through, everything is healed and drained, and the history of the run is audited.

What happened is data (`history.py`), and the audit is a pure function over it. So a verdict rests on what readers saw,
on what Spark planned and on what was decided, never on what a sink says of itself; and the rules are tried on histories
that no pipeline would write. A verdict is true, false or unknown. A run that compared nothing, or that broke off, is
unknown, which is not a pass.

    settings.py   what a run is asked to do, checked before anything is started
    workload.py   makes row n, its identity, its key, and what is expected of it
    pipelines.py  the built-in pipeline, by environment variables
    feeders.py    put rows into the source of a pipeline (kafka_feeder.py, file_feeder.py)
    feeding.py    rows as long as the run lasts, a little ahead of what was read
    readers/      one reader per kind of sink, a thread each
    plan.py       the faults of a seed
    nemesis.py    what is done to a life, one function per kind of fault
    life.py       one life of the pipeline: process group, events, signals
    classes.py    Spark's classes, kept from one run to the next
    child.py      what runs in the process of the pipeline
    servers.py    servers that are started for the run, each behind a proxy
    proxy.py      a TCP proxy that can be cut and slowed down
    disk.py       a checkpoint folder that can be full
    checkpoint.py what Spark planned and what was decided, read while the pipeline runs
    history.py    what happened, as data
    anomalies.py  what can be wrong, by name
    looks.py      the looks at one sink, played in their order
    audit.py      the rules, and the verdict
    claims.py     what that proves and what it does not, in sentences
    timeline.py   the picture of a run
    report_html.py  the report as one HTML file, with page.css
    report.py     the report, JUnit XML and the JSON object
    stage.py      all that a run needs, set up and checked
    run.py        all of it in its order

A seed gives the same plan each time; what the machine makes of it differs, as kills hit moments, not statements.
"""
