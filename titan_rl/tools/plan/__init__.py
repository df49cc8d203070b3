"""Plans the time of a run: placement, seconds per step, and what bounds them, before anything is started."""
