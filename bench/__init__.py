"""Benchmarks: one module per claim; each prints JSON and runs its peer in the same run."""
