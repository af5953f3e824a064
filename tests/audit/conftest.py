"""Fixtures of the audit's tests."""

from __future__ import annotations

from semel.testing.fixtures import fixtures
from tests.contract.conftest import HARNESSES, address

harness, _ = fixtures(HARNESSES, address)
"""A fresh target of each sink, as for the contract."""
