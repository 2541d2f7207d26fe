"""Metrics per user, confidence intervals, and the baselines to compare with."""
