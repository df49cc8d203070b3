"""Controls a run over a Unix socket while it runs."""
