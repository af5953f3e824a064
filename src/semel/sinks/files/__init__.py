"""Parquet files in a folder."""

from semel.sinks.files.sink import Files, committed_files, read_committed

__all__ = ["Files", "committed_files", "read_committed"]
