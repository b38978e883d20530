"""Calls one function, as `support.program` has packed it."""

from __future__ import annotations

import pickle
import sys

if __name__ == "__main__":  # not in the workers that a function starts
    function, args, options = pickle.loads(bytes.fromhex(sys.argv[1]))
    function(*args, **options)
