"""Chat: people and groups, in conversations that all members see alike."""
