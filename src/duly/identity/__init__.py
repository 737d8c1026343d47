"""Accounts, people, tokens and keys: who a caller is and what it may do."""
