"""Puffin, the file format of deletion vectors."""
