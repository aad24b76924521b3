"""Training logic that all frontends share and that imports no framework."""
