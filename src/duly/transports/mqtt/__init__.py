"""MQTT 5 and 3.1.1: packets, sessions, and a link that reconnects."""
