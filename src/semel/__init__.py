"""Exactly-once from source to sink for PySpark Structured Streaming."""
