"""The embedded MQTT broker, and access rules for any broker."""
