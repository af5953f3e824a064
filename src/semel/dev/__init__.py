"""Real servers on one machine, for tests and demonstrations. Nothing in a running pipeline imports this."""
