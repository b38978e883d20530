"""The work of a task on a file, by format. It runs in a worker, on any machine."""
