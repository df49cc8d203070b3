"""Controls a running run over a Unix socket."""
