"""From one request to the text of its answers."""
