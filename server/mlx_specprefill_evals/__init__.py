"""The quality suite: measurements of sparse prefill on tasks with known answers.

It holds tasks, arms, the models under test, reports, plots and the command `mlx-specprefill eval`. Neither the library
nor the server imports it. Read first: suite.py, tasks/base.py, local.py.
"""
