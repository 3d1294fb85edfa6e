"""``python -m tests.fuzz.one_target NAME CORPUS [libFuzzer options]``: coverage-guided bytes.

One process a target: libFuzzer ends the process it runs in.
"""

from __future__ import annotations

import os
import sys

import atheris

from tests.fuzz.targets import find

_MEMORY_MB = 1024
_SECONDS_AN_INPUT = 5


def main() -> None:
    """Fuzz until libFuzzer's limits end it; its exit status tells whether something was found."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    name, corpus, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["device_sdk", "aggregator"]):
        target = find(name)
    atheris.Setup(
        [
            # Merging runs this line again, by a shell.
            f"{sys.executable} -m tests.fuzz.one_target {name}",
            corpus,
            f"-max_len={target.most_bytes}",
            f"-rss_limit_mb={_MEMORY_MB}",
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
