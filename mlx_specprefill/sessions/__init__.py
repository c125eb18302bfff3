"""A conversation whose text was read in part: dropped text is read later, behind what the cache holds."""
