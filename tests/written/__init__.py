"""What each release has written, kept so that later versions are tested to read it.

`python -m written` (in tests/) writes the folder of this version, once, before its release. Afterwards a folder stays
as it is. Its keys are for tests and are no secret.
"""
