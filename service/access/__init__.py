"""Who may call what: keys, the gate in front of every route, rate limit, audit log."""
