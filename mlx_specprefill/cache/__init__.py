"""KV caches in which slot and position differ, alone and in a batch, and caches kept between requests."""
