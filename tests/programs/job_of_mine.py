"""A script as users have it: encrypts the current directory, with folders first on the path. Run by its text, too."""

import json
import os
import sys

from ags_fast.jobs import LocalEngine, encrypt_files

kms, paths = map(json.loads, sys.argv[1:])
os.environ["PYTHONPATH"] = os.pathsep.join(["", ".", "lib", os.environ.get("PYTHONPATH", "")])
for path in paths:
    sys.path.insert(0, path)
    sys.path_importer_cache.clear()
if __name__ == "__main__":
    done = encrypt_files(".", "../out", kms=kms, wrapping_key_id="master", engine=LocalEngine(1), fsync=False)
    done.raise_for_failures()
    print(done.counts["ok"])
