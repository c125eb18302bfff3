"""What a sequence remembers."""
