"""What happens before any process is spawned: load a config, check it, plan the run, describe the plan."""
