"""The kept chunks of a prompt and the reasons, as data and as a picture."""
