"""The store: versions of the catalogue and onboarding jobs, in SQLite or PostgreSQL.

It knows no HTTP and no engine; the worker and every replica of the service open the same one.
"""

from service.store.store import Store

__all__ = ["Store"]
