"""What the server counts and measures, and how it tells: for Prometheus, for people, for the page."""
