"""One message to many recipients: plan, attempts, a queue per recipient."""
