"""Ranks of their own: meshes keep a group's sockets, so that tests of others would find them after a failed call."""

from __future__ import annotations

from tests.support.toy_training import room_ranks

__all__ = ["room_ranks"]
