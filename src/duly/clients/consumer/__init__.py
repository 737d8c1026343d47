"""`duly.Consumer`: runs the messages of any at-least-once queue once, and in order."""
