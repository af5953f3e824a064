"""What the sinks for SQL databases share."""
