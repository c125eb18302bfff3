"""Generation: from one request to the text of its answers."""
