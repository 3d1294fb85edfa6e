"""The home folder: all that a device keeps, in one folder that one process holds at a time."""

from __future__ import annotations
