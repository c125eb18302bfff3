"""Reading of a prompt: its plan, scores, chunks and their costs, and verdicts on the answer."""
