"""Online onboarding: jobs, the grounding worker, and publishing what the store says is current."""
