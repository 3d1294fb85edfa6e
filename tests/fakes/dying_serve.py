"""``tessera-aggregator serve`` that kills itself: ``dying_serve HOME POINT CALLS``.

At the CALLS-th passage of POINT (``tests.faults.crash_points``), by SIGKILL.
"""

from __future__ import annotations

import sys

from aggregator.cli import main
from tests.faults.crash_points import arm

if __name__ == "__main__":
    home, point, calls = sys.argv[1:]
    arm(point, int(calls))
    sys.exit(main(["serve", "--home", home]))
