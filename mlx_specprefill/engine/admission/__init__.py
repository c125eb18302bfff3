"""Predicts the cost of a request: its memory against the limit, and the time that sparse prefill saves.

Here: predictions and the measurements behind them. Not here: the order of work (`engine.scheduler`). Read first:
planner.py, memory.py.
"""
