"""Feeds prompts to the generators and hands finished, judged groups to the trainers."""
