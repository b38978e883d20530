"""The files of a dataset: what reads and writes the contents of each format."""
