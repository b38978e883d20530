"""What a task does to a file of each format. It runs in a worker, on whatever machine."""
