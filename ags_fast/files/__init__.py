"""One file: where its bytes are read from, where they are written to, and a cursor over reads by position."""
