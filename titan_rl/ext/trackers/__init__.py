"""Experiment trackers: Weights & Biases, Trackio, MLflow. TensorBoard is written by titan_rl/record/curves.py.

    run log ── send ──> queue ── thread ──> tracker process (__main__.py) ──> services.py ──> server or files
    warnings, id, where to look <── thread ──┘

A tracker has its own process, so that neither its imports nor a server that hangs costs a step any time.
"""
