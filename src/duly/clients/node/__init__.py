"""`duly.Node`: tasks from node to node over any MQTT broker."""
