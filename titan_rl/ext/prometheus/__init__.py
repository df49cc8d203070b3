"""Shows a run's last metrics to Prometheus, over HTTP in its text format."""
