"""What a conversation says, rendered to tokens, and where its parts lie."""
