"""The decision log: who runs a pipeline, and what was decided of each batch. It lives in `<checkpointLocation>/semel/`.

    pipeline.json                    whose checkpoint this is
    incarnations/0000000003.json     the third start claimed the pipeline
    decisions/0000000042.0.json      slot 0 of batch 42

Every file is created if absent and never changed. `log.py` knows these names, `records.py` what is inside, and a store
(`memory.py`, `files.py`, `hadoop.py`) how to create a file so that exactly one creator wins and the file survives.
"""
