"""Views of runs and clusters: terminal, HTML reports, live pages with their server, Prometheus."""
