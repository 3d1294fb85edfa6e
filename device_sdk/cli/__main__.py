"""`python -m device_sdk.cli` is `tessera-device`."""

from __future__ import annotations

import sys

from device_sdk.cli import main

if __name__ == "__main__":
    sys.exit(main())
