"""What a request will cost: memory against the limit, time against the gain of sparse prefill.

Here: predictions and the measurements behind them. Not here: the order of work (`engine.scheduler`). Read first:
planner.py, memory.py, cost.py.
"""
