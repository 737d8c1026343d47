"""The gateway: commands from apps to devices, with two acknowledgements."""
