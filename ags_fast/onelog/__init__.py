"""The floor of datasets on one log, by the rules of its protocol. It takes the place of `ags_fast.dataset`."""
