"""The ags-fast command: arguments, progress, text and exit codes. The library never imports this package.

Exit codes: 0 done, 1 a file failed, 2 usage, 3 integrity or format, 4 no access to the key, 5 not found, no
permission, or standard output takes nothing, 6 configuration or a missing module, 128 + n interrupted by signal n.
"""

from ags_fast.cli.run import command, main

__all__ = ["command", "main"]
