"""Which chunks a prompt keeps and why, as data and as a picture."""
