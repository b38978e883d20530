"""Encrypted datasets: the objects under ``_ags/``, and what is read of them and decided.

The layout and every byte are in docs/dataset-format.md. Nothing is changed in place: a version is a numbered object,
and creating that object is the commit.
"""
