"""Every decoder of the product, by the name under which it is fuzzed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.fuzz.target import Target


def all_targets() -> Mapping[str, Target]:
    """Whatever is fuzzed."""
    return {target.name: target for table in _tables() for target in table}


def find(name: str) -> Target:
    """One target, with no import that only those after it need: a fuzzer instruments all that it
    imports. Raises KeyError."""
    for table in _tables():
        for target in table:
            if target.name == name:
                return target
    raise KeyError(name)


def _tables() -> Iterator[Sequence[Target]]:
    from tests.fuzz.codec_targets import CODEC_TARGETS

    yield CODEC_TARGETS
    from tests.fuzz.sealed_targets import SEALED_TARGETS

    yield SEALED_TARGETS
    from tests.fuzz.method_targets import METHOD_TARGETS

    yield METHOD_TARGETS
    from tests.fuzz.file_targets import FILE_TARGETS

    yield FILE_TARGETS
