"""One message to many recipients: plans, attempts, and a queue per recipient."""
