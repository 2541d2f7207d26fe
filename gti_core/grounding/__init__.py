"""Grounding: starting values of the SID rows, the corpus, and figures about the rows."""
