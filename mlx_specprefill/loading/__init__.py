"""Models from files into memory: where they are, their arrays, their sizes; GGUF files."""
