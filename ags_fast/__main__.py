"""``python -P -m ags_fast`` is the ags-fast command. Without ``-P`` Python imports from the current directory first."""

from __future__ import annotations

import sys

from ags_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
