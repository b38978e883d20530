"""``python -P -m ags_fast`` is the ags-fast command. Without ``-P`` Python imports from the current directory first."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from ags_fast._terminal import interrupts

    interrupts.install()  # before the rest is imported
    from ags_fast.cli import command

    sys.exit(command())
