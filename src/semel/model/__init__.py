"""The model checker: every order of events of a small world, explored breadth first.

    world         what a state is: decision log, stores, drivers, requests on their way, and what the adversary may do
    rules         the production functions of `semel.protocol`, called with compact codes and remembered
    stores        three kinds of store, as their sinks behave
    driver        the order of operations of `runtime.startup` and `runtime.batch`, one atomic step at a time
    adversary     crashes, a second driver, lost and late requests, expiry, restarts
    properties    what must hold always, and what must have been seen sometimes
    checker       the search, and the shortest way to a state
    trace         a way in words, or as a sequence diagram
    scopes        named sets of bounds: one for every build, one for the proof
    report        what came of a scope
    mutants       seeded bugs, each of which the checker must find; `bugs` has what each changes

The model knows *how* a driver works, step by step, and what may go wrong in between. It knows no rule of the protocol:
what an event leads to, what a start does about a batch or a branch, what may be written into the log, and which parts
of a replay mend a batch is asked of the very functions that the runtime calls.
"""
