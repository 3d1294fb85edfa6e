"""Taking part in rounds, without a socket or a thread: messages in, actions out."""

from __future__ import annotations
