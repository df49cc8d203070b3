"""Why a run does not learn: rules over its metrics, its config and its samples, and the ranking of their findings."""
