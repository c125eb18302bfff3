"""The server's process: the application, signals, the first log lines, a Mac that stays awake."""
