"""`semel audit`: what the checkpoint and the sinks of a live pipeline prove, batch by batch. It changes nothing.

    facts      what was read, as data
    ranges     what Spark planned: the range of each batch in its sources
    gather     reads the checkpoint and the sinks, in the order in which nothing that happens meanwhile can mislead
    results    what it comes to, as data
    journals   what a batch's journal decided. Pure
    cells      what one sink shows of one batch. Pure
    findings   what is wrong, by name. Pure
    compare    facts in, verdict out. Pure
    report     the same as JSON and as lines for people
    run        loads the pipeline file, starts Spark, and puts the above together

A missing marker counts only where the sink says that it would still have it; what nobody can say is "not proven" and
never "lost".
"""
