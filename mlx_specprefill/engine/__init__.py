"""Runs requests on one MLX thread and reports events.

Here: the loop, the scheduler, prefills chunk by chunk, the rows that decode. Not here: HTTP, texts, templates. Read
first: loop.py, prefill.py, scheduler.py.
"""
