"""The one door to storage: a folder, here or in an object store, and files that appear in it only when complete.

`Store` is the folder, `NewFile` and `NewObject` are files in the making.
"""

from ags_fast.fs.base import NO_LOCK_SECONDS, TIMES_NS, Entry, Store, without_password
from ags_fast.fs.below import NotAFileError, open_regular
from ags_fast.fs.choose import file_at
from ags_fast.fs.local import LocalFile
from ags_fast.fs.new import NewFile, NewObject, pwrite_all
from ags_fast.fs.paths import SUFFIX, folder_of, local_path

__all__ = ["NO_LOCK_SECONDS", "SUFFIX", "TIMES_NS", "Entry", "LocalFile", "NewFile", "NewObject", "NotAFileError"]
__all__ += ["Store", "file_at", "folder_of", "local_path", "open_regular", "pwrite_all", "without_password"]
