"""What went wrong, in words for people."""

from __future__ import annotations


def in_words(error: BaseException) -> str:
    """An error's class and what it says, for people. What it says is its class's code, which may
    be any package's, and fail."""
    name = type(error).__name__
    try:
        said = str(error)
    except Exception as failed:
        said = f"its words cannot be had ({type(failed).__name__})"
    return f"{name}: {said}" if said else name
