"""Chat: conversations between people and in groups, which all members see in the same order."""
