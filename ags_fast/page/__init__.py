"""What ``ags-fast keys audit --html`` writes: one page without scripts, and without anything from elsewhere."""
