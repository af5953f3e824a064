"""What the decision log asks of a place to keep records. One test suite covers every store."""

from __future__ import annotations

from abc import ABC, abstractmethod


class StoreUnanswered(Exception):
    """The store did not say whether the record was created. Neither yes nor no may be assumed."""


class RecordStore(ABC):
    """Small immutable files under one root. Paths are relative, with forward slashes."""

    @abstractmethod
    def create(self, path: str, content: bytes) -> bool:
        """Create a file whole and durable, or not at all. False when it exists already; exactly one creator gets True.

        Raises StoreUnanswered or OSError when the outcome is not known: the caller must not assume either.
        """

    @abstractmethod
    def replace(self, path: str, content: bytes) -> None:
        """Write a file whole and durable, in place of whatever is there. Readers see the old content or the new one."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """The content, or None when there is no such file."""

    @abstractmethod
    def exists(self, path: str) -> bool: ...

    @abstractmethod
    def list(self, folder: str) -> list[str]:
        """The names of the files in a folder, sorted, temporary ones left out. Empty when there is no such folder."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; harmless when there is none."""

    @abstractmethod
    def describe(self) -> str:
        """Where this is, for messages."""
