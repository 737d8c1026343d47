"""The dashboard: the web page of a hub, and the JSON that it shows."""
