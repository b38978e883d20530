"""Engines that run the tasks of a job on one machine."""
