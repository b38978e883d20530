"""The floor of datasets on one log, by the rules of docs/protocol.md. It takes the place of `ags_fast.dataset`."""
