"""The real coordinator in a world that is made of one seed.

`semel.runtime.batch`, `startup`, `restore`, `plans`, `mend` and the decision log run as they are. What they talk to is
simulated: three kinds of stores, the records of the log, Spark and its checkpoint, the tasks, the clock. Each call
out of a driver goes over its line (`line.py`), and there the plan of the seed (`faults.py`) lets the driver die, loses
the answer, delays the request, or stops the driver until another one has taken over.

    faults.py        what goes wrong, and when: drawn from the seed
    scheduler.py     drivers are threads of which exactly one runs; the seed says which
    line.py          every call of a driver to the outside, and what the faults do to it
    stores.py        three stores: requests that happen whole or not at all
    participants.py  how a sink uses each of them, after the model of the real ones
    records.py       the store of the decision log
    source.py        the rows that go in
    checkpoint.py    the files of Spark: which are there, which are on disk, and copies of them
    spark.py         the query, the tasks, and the loop that hands batches to the coordinator
    world.py         all of that for one seed
    trace.py         what happened, in words
    audit.py         what must be true after every effect, and at the end
    run.py           one seed, many seeds, and the command

A seed gives the same trace each time, in every process. `python -m semel.simulation --first-seed S --seeds 1 --trace`
shows it.
"""
