"""What runs: `pipeline` is what the user writes, `spark` the glue, then `startup`, `batch` and `task`."""
