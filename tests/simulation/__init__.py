"""Runs real operations on datasets over one simulated store, and decides what happens between any two of their steps.

Each operation is a process of its own. The driver answers its requests to the store, one at a time. So the driver can
stop an operation before any request and let others run, end the operation there for good, lose an answer, apply a write
late, and move the clock by days. A model of the files says afterwards what must be there.

``python -m simulation`` in tests/ runs schedules: see `simulation.__main__`. The modules:

- `world`: what the store holds, the clock, the versions of master keys, and requests to all of that.
- `store`, `kms`: the door that ags_fast knocks at, in the process of an operation.
- `actors`: processes that stop before each request.
- `operations`: what can be done to a dataset, and what that makes of the model.
- `oracle`: what must be true in the end.
- `schedules`: pairs of operations, one operation with one fault, random schedules.
"""
