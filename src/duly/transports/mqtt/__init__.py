"""MQTT 3.1.1: packets, sessions, and a link that reconnects."""
