"""What a multi-turn rollout consists of: the user's environment, its tools, the conversation as tokens. No torch."""
