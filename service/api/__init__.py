"""HTTP routes: one small router per resource. Routers see a `Runtime`, never an engine class."""
