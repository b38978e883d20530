"""The tour, ``make run``: files encrypted on Spark, read, rotated and decrypted, with every step checked."""
