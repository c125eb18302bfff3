"""The requests in work: what each has found, its job, how it fails, whose turn it is."""
