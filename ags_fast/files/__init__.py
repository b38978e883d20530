"""One file: where its bytes are read from, and where they are written to."""
