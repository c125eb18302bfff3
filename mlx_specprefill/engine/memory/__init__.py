"""Memory in bytes: the machine's, that of all engines, what each request reserves."""
