"""The simulator against published measurements: one module per table, with every row that misses."""
