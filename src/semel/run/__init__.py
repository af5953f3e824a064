"""The program behind `semel run`: load a file, open a session, run its pipelines until they end."""
