"""Handles and transactions of datasets, over `ags_fast.onelog`."""
