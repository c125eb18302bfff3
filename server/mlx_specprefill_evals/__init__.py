"""The quality suite: what sparse prefill keeps and loses on tasks with known answers.

Here: tasks, arms, the models under test, reports and plots, the command `mlx-specprefill eval`. Imported by neither
library nor server. Read first: suite.py, tasks/base.py, local.py.
"""
