"""``python -m tests.fuzz.one_target NAME CORPUS [libFuzzer options]``: coverage-guided bytes.

One process a target: libFuzzer ends the process it runs in.
"""

from __future__ import annotations

import os
import resource
import sys

import atheris

from tests.fuzz.targets import find

_MEMORY_MB = 1024
_SECONDS_AN_INPUT = 5


def _memory_limit_mb() -> int:
    """libFuzzer judges by ru_maxrss, which a process takes over from the one that starts it: a
    parent that ever held a gigabyte had ended the fuzzer with "out of memory" before its first
    input."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 + _MEMORY_MB


def main() -> None:
    """Fuzz until libFuzzer's limits end it; its exit status tells whether something was found."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    name, corpus, *options = sys.argv[1:]
    limit = _memory_limit_mb()
    with atheris.instrument_imports(include=["device_sdk", "aggregator"]):
        target = find(name)
    atheris.Setup(
        [
            # Merging runs this line again, by a shell.
            f"{sys.executable} -m tests.fuzz.one_target {name}",
            corpus,
            f"-max_len={target.most_bytes}",
            f"-rss_limit_mb={limit}",
            f"-timeout={_SECONDS_AN_INPUT}",
            "-print_final_stats=1",
            "-verbosity=0",
            *options,
        ],
        target,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
