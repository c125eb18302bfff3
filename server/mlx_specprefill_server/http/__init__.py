"""HTTP before any dialect: sockets, connections, limits, keys, errors, the access log."""
