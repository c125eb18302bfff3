"""Selection: sparse or full, forced tokens, the draft's heads and scores, and the tokens that are kept."""
