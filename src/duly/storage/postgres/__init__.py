"""The ledger in PostgreSQL, shared by several hubs."""
