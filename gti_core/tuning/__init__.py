"""Tuning: the training loop, sequences and adapters."""
