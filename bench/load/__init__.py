"""Load and endurance of the running service, driven by Locust."""
