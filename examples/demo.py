"""The demos behind `make demo`: the fleet's, and by a flag two others."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from device_sdk.system.command_line import print_any_text

_HELP = """\
usage: make demo ARGS="[--recommender | --local] [OPTIONS]"

  make demo                      48 unequal devices learn one model: tessera-aggregator demo
  make demo ARGS=--recommender   films instead, on MovieLens 100K
  make demo ARGS=--local         no fleet: export, measure and train on this machine alone (exports
                                 with torch: make venv first)

Behind one of them, --help tells its options. Without a flag they are these:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the one that the first flag names; its exit status."""
    print_any_text()
    told = list(sys.argv[1:] if argv is None else argv)
    if "--recommender" in told:
        from examples import recommender_demo

        told.remove("--recommender")
        return recommender_demo.main(told)
    if "--local" in told:
        from examples import local_story

        told.remove("--local")
        return local_story.main(told)
    from aggregator.cli import main as aggregator

    if {"-h", "--help"} & set(told):
        print(_HELP)
    return aggregator(["demo", *told])


if __name__ == "__main__":
    sys.exit(main())
