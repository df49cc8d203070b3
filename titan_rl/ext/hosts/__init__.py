"""Runs on several hosts: workers that offer them, and the controller's ends of these."""
