"""How fast ags_fast is, beside a bare loop over EVP in C and the best that Python can do: ``python -m benchmarks``."""
