"""What an answer's form must be: tool choice, JSON schemas, and their grammars."""
