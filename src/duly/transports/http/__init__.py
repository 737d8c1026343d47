"""HTTP: messages, logins, alerts, the OpenAPI document and static files."""
