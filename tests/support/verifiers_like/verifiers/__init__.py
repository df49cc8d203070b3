"""What verifiers_agent.py uses of verifiers 0.4, in one module, for a Python that does not have it."""
