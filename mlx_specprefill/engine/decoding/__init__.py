"""One decode step for all answers: which rows share a forward."""
