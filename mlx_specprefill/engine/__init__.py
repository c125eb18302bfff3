"""Runs requests on one MLX thread and reports events.

Here: the loop, the scheduler, prefills slice by slice, the rows that decode. Not here: HTTP, text, tokenizers but for
grammars. Read first: loop.py, prefill.py, scheduler.py.
"""
