"""Devices of a hub in Home Assistant, by MQTT discovery."""
