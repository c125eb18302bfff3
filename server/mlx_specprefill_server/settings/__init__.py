"""Settings of the server and of a pair, with their defaults, and their values as people write them."""
