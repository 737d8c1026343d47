"""What users import: the app's, the device's side of the wire."""
