"""What depends on the keys of a dataset, what may be destroyed, and what to run next. An audit changes nothing."""
