"""GTI Serve: the recommendation service."""

__version__ = "0.1.0"
