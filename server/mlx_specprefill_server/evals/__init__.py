"""The quality suite: what sparse prefill keeps and loses, measured on tasks whose answers are known."""
