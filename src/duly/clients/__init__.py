"""The clients that users import: app, device, chat, sentinel and node."""
