"""What runs the tasks of a job on one machine."""
